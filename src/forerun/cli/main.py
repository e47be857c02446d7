"""The command `forerun`: finds the chosen command, and turns what it raises into words and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun import interrupt
from forerun.cli import words
from forerun.config.addresses import check_arguments
from forerun.config.protocols import check_options
from forerun.errors import DISK_ERRORS, OUR_BUG, StorageError, UserError, did_you_mean
from forerun.memory_limit import out_of_memory, require_address_space
from forerun.safe_text import safe_streams
from forerun.units import KIB

INTERRUPTED = 130
PIPE_CLOSED = 141
# The smallest job that works on a machine of two cores: 600,000 KiB for `check` and `data`, 1,800,000 KiB for `train`.
# Below that, jax ends the process with SIGABRT or SIGSEGV in most cases, and no error could be shown.
ADDRESS_SPACE_BYTES = dict.fromkeys(("check", "data", "plan"), 550_000 * KIB)
ADDRESS_SPACE_BYTES |= dict.fromkeys(("train", "cache", "generate", "chat", "eval", "export"), 1_700_000 * KIB)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 a bug of ours, 2 the user's mistake, 74 a disk or bucket, 130 Ctrl-C."""
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
    """Says what went wrong, to the one being handled; its exit code."""
    asked = _traceback_printed(arguments)
    if isinstance(error, UserError):
        if not asked:
            print(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        if not interrupt.pressed():  # else it is the last line of the process
            print("\nstopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and _reader_left():
        return PIPE_CLOSED
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        trouble = _disk_trouble(error)
        print(trouble, file=sys.stderr)
        return trouble.exit_code
    if (mistake := out_of_memory(error) or _locale_mistake(error)) is not None:
        print(mistake, file=sys.stderr)
        return mistake.exit_code
    print(_bug_text(error, () if asked else arguments), file=sys.stderr)
    return OUR_BUG


def _set_up_process() -> None:
    """Make every text printable, and no new file writable for everybody, here and in child processes."""
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
        print(words.help_text())
        return 0
    name, *rest = arguments
    if name == "--version":
        from forerun import __version__

        print(f"forerun {__version__}")
        return 0
    if name not in words.COMMANDS:
        raise _unknown(name)
    check_arguments(rest)
    try:
        args = words.parser_of(name).read(rest)
    except SystemExit:  # argparse has printed --help
        return 0
    check_options(vars(args))
    require_address_space(ADDRESS_SPACE_BYTES.get(name, 0), f"forerun {name}")
    return int(importlib.import_module(f"forerun.cli.{name}").run(args))


def _unknown(name: str) -> UserError:
    if name.startswith("-"):
        near = did_you_mean(name, words.GLOBAL_OPTIONS)
        fix = f"did you mean '{near}'?" if near else "put the options of a command after its name"
        return UserError(f"unknown option '{name}'", why="it stands before any command", fix=fix)
    if Path(name).suffix in (".yaml", ".yml"):
        fix = f"did you mean 'forerun train {name}'?"
    else:
        near = did_you_mean(name, words.COMMANDS)
        fix = f"did you mean 'forerun {near}'?" if near else "see: forerun --help"
    return UserError(f"unknown command '{name}'", why=f"commands: {', '.join(words.COMMANDS)}", fix=fix)


def _traceback_printed(arguments: Sequence[str]) -> bool:
    """Prints the traceback if `--debug` asks for it; it ends with the text of the error."""
    if "--debug" not in arguments:
        return False
    import traceback

    traceback.print_exc()
    return True


def _disk_trouble(error: OSError) -> StorageError:
    """Of a file that no other text is about."""
    file = str(error.filename or "a file")
    return StorageError(
        f"{file} cannot be written or read",
        why=str(error.strerror),
        fix="make room, or mend the disk or its permissions; the same command goes on from what is whole",
    )


def _locale_mistake(error: BaseException) -> UserError | None:
    """Return the error to show for a file name that the locale's encoding cannot represent, else None."""
    encoding = sys.getfilesystemencoding()
    if not isinstance(error, UnicodeEncodeError) or encoding == "utf-8":
        return None
    return UserError(
        f"{error.object!a} cannot be used as a file name in this locale",
        why=f"the encoding of file names and arguments is {encoding}",
        fix="export LC_ALL=C.UTF-8, and unset PYTHONUTF8 or set it to 1",
    )


def _bug_text(error: BaseException, arguments: Sequence[str]) -> str:
    """What to say of our own mistake, and with which arguments to run again for the traceback."""
    import shlex

    text = f"this is a bug in forerun: {type(error).__name__}: {error}".rstrip(": ")
    again = f"\n  for the traceback run: {shlex.join(['forerun', '--debug', *arguments])}"
    return text + (again if arguments else "")


def _reader_left() -> bool:
    """Whether the reader of our output is gone (`forerun check job.yaml | head`), so nobody is left to tell."""
    import select

    try:
        output = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # what is still buffered goes nowhere
    return True


if __name__ == "__main__":
    from forerun.__main__ import main as entry_point

    entry_point()
