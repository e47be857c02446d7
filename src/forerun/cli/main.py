"""The command `forerun`: run the chosen command, and turn its errors into messages and exit codes."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun import interrupt
from forerun.cli import commands
from forerun.cli.arguments import call, load_function
from forerun.config.addresses import check_arguments, check_options
from forerun.errors import DISK_ERRORS, StorageError, UserError, did_you_mean
from forerun.exit_codes import INTERRUPTED, OUR_BUG, PIPE_CLOSED
from forerun.memory_limit import out_of_memory, require_address_space
from forerun.reporter import LineReporter
from forerun.safe_text import clean, raw_stream, safe_streams
from forerun.units import KIB

# The smallest job that works on a machine of two cores: 600,000 KiB for `check` and `data`, 1,800,000 KiB for `train`.
# Below that, jax ends the process with SIGABRT or SIGSEGV in most cases, and no error could be shown.
ADDRESS_SPACE_BYTES = dict.fromkeys(("check", "data", "plan"), 550_000 * KIB)
ADDRESS_SPACE_BYTES |= dict.fromkeys(
    ("train", "profile", "cache", "generate", "chat", "eval", "export"), 1_700_000 * KIB
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 a bug in forerun, 2 a mistake of the user, 74 a problem of a disk or bucket, 130 Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # pydantic would search all installed packages for plugins, which takes longer than the rest of a config error
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if argv is None:
        # Python's multiprocessing starts children with `python -c`, which imports modules from the working directory
        # first. The variable prevents that in all descendants; tests that call `main` keep their environment.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    _set_up_process()
    with safe_streams():
        try:
            code = _run(arguments)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            return told(error, arguments)


def told(error: BaseException, arguments: Sequence[str]) -> int:
    """Print the error that is being handled, and return its exit code."""
    asked = _traceback_printed(arguments)
    if isinstance(error, UserError):
        if not asked:
            print_error(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        if not interrupt.pressed():  # else it is the last line of the process
            print("\nstopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and _reader_left():
        return PIPE_CLOSED
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        trouble = _disk_trouble(error)
        print_error(trouble)
        return trouble.exit_code
    if (mistake := out_of_memory(error) or _locale_mistake(error)) is not None:
        print_error(mistake)
        return mistake.exit_code
    print(_bug_text(error, () if asked else arguments), file=sys.stderr)
    return OUR_BUG


def print_error(error: UserError) -> None:
    """Print an error on stderr. On a terminal its code is dim."""
    text, code = clean(str(error)), f"[{error.code}]"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = text.replace(code, f"\x1b[2m{code}\x1b[0m", 1)
        print(text, file=raw_stream(sys.stderr))
    else:
        print(text, file=sys.stderr)


def _set_up_process() -> None:
    """Make every text printable, and new files not writable for other users, here and in child processes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in an ASCII locale, 'é' is printed as '\\xe9'
    mask = os.umask(0o077)
    # A mask such as 002 shares files with the user's group on purpose. One that lets everybody write is a mistake.
    os.umask(mask if mask & 0o002 else mask | 0o022)


def _run(arguments: list[str]) -> int:
    while arguments and arguments[0] == "--debug":
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("--help", "-h"):
        print(commands.help_text())
        return 0
    name, *rest = arguments
    if name == "--version":
        from forerun.version import __version__

        print(f"forerun {__version__}")
        return 0
    if name not in commands.COMMANDS:
        raise _unknown(name)
    check_arguments(rest)
    try:
        values = vars(commands.parser_of(name).read(rest))
    except SystemExit:  # argparse has printed --help
        return 0
    check_options(values)
    require_address_space(ADDRESS_SPACE_BYTES.get(name, 0), f"forerun {name}")
    values.pop("debug", None)
    function = load_function(commands.COMMANDS[name].function)
    if "reporter" in inspect.signature(function).parameters:
        values["reporter"] = LineReporter(sys.stderr)  # stdout has the result only
    result = call(function, values)
    if isinstance(result, int):  # of a function in `cli`, which has printed its result
        return result
    print(result)
    return 0


def _unknown(name: str) -> UserError:
    if name.startswith("-"):
        near = did_you_mean(name, commands.GLOBAL_OPTIONS)
        fix = f"did you mean '{near}'?" if near else "put the options of a command after its name"
        return UserError("E-COMMAND-015", f"unknown option '{name}'", why="it is in front of the command", fix=fix)
    if Path(name).suffix in (".yaml", ".yml"):
        fix = f"did you mean 'forerun train {name}'?"
    else:
        near = did_you_mean(name, commands.COMMANDS)
        fix = f"did you mean 'forerun {near}'?" if near else "see: forerun --help"
    return UserError(
        "E-COMMAND-016", f"unknown command '{name}'", why=f"commands: {', '.join(commands.COMMANDS)}", fix=fix
    )


def _traceback_printed(arguments: Sequence[str]) -> bool:
    """Print the traceback, which ends with the text of the error, if `--debug` is given; return whether it is."""
    if "--debug" not in arguments:
        return False
    import traceback

    traceback.print_exc()
    return True


def _disk_trouble(error: OSError) -> StorageError:
    """Return the error for a failed read or write that no other code reports."""
    file = str(error.filename or "a file")
    return StorageError(
        "E-COMMAND-017",
        f"{file} cannot be written or read",
        why=str(error.strerror),
        fix="free some space, or repair the disk or its permissions; the same command then resumes",
    )


def _locale_mistake(error: BaseException) -> UserError | None:
    """Return the error to show for a file name that the locale's encoding cannot represent, else None."""
    encoding = sys.getfilesystemencoding()
    if not isinstance(error, UnicodeEncodeError) or encoding == "utf-8":
        return None
    return UserError(
        "E-COMMAND-018",
        f"{error.object!a} cannot be used as a file name in this locale",
        why=f"the encoding of file names and arguments is {encoding}",
        fix="export LC_ALL=C.UTF-8, and unset PYTHONUTF8 or set it to 1",
    )


def _bug_text(error: BaseException, arguments: Sequence[str]) -> str:
    """Return the message about a bug in forerun, with the command that prints its traceback."""
    import shlex

    text = f"this is a bug in forerun: {type(error).__name__}: {error}".rstrip(": ")
    again = f"\n  for the traceback run: {shlex.join(['forerun', '--debug', *arguments])}"
    return text + (again if arguments else "")


def _reader_left() -> bool:
    """Return whether the reader of the output has closed its pipe, as in `forerun check job.yaml | head`."""
    import select

    try:
        output = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # discards what is still buffered
    return True
