"""Ctrl-C in commands: the first one stops within two seconds, the second one immediately, both with exit code 130.

Python runs signal handlers in the main thread, and only between two bytecodes. A compilation, a collective or a slow
read would delay them for as long as it takes, and ending the interpreter while XLA's threads run can crash. So a daemon
thread reads the signals (`signal.set_wakeup_fd`) and ends the process with `os._exit`. Nothing is unwound. That is
safe because every file is written so that a kill at any moment leaves it complete or absent.

A phase that can do better uses one of these:

- `cooperating`: the phase gets a call, and `LIMIT_SECONDS` to end on its own. Training saves a checkpoint there.
- `raising`: KeyboardInterrupt is raised in the main thread, as Python does. The same limit applies.
- `cleanup`: a short function that runs before the process ends, such as one that restores the terminal.

Only the command line calls `install`. Without it, all contexts do nothing and Ctrl-C behaves as in any Python program.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
LIMIT_SECONDS = 1.3  # for a phase that stops on its own
# For the cleanups and the last words: a full pipe or a slow disk must not delay the end.
END_SECONDS = 1.6  # after the first press
END_AGAIN_SECONDS = 0.3  # after the second press
COUNT_SECONDS = 0.5  # for the watching thread to see a press

Report = Callable[[], str]


class _State:
    """What the threads share. Each field is replaced in one step, so reading needs no lock."""

    def __init__(self) -> None:
        self.writer = -1  # of the pipe with the signal numbers; -1 before `install`
        self.presses = 0
        self.since = 0.0  # when it was pressed first
        self.deadline: float | None = None
        self.stops: tuple[Callable[[float], None], ...] = ()
        self.raising = 0
        self.cleanups: tuple[Callable[[], None], ...] = ()
        self.copies: tuple[int, ...] = ()
        self.report: Report | None = None


_state = _State()
_writing = threading.Lock()  # of `cleanups`, which several threads may change


def install() -> None:
    """Handle Ctrl-C in this process from now on. Main thread only; a SIGINT that is ignored stays ignored."""
    if _state.writer < 0:
        reader, _state.writer = os.pipe()
        os.set_blocking(_state.writer, False)
        threading.Thread(target=_watch, args=(reader,), name="ctrl-c", daemon=True).start()
    signal.set_wakeup_fd(_state.writer, warn_on_full_buffer=False)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _in_main_thread)


def reinstall() -> None:
    """Handle Ctrl-C again after code that had its own handler, such as asyncio. Does nothing before `install`."""
    if installed():
        install()


def installed() -> bool:
    return _state.writer >= 0


def pressed() -> bool:
    """Return whether Ctrl-C was pressed, and no phase has called `handled` since."""
    return _state.presses > 0


def handled() -> None:
    """Continue after a Ctrl-C that ended only a part of the work, such as one answer of a chat."""
    _state.deadline, _state.presses = None, 0


def copy_signals_to(descriptor: int) -> bool:
    """Write the numbers of all signals to a pipe too: there is one wakeup descriptor per process.

    Returns False if this process has no `install`, and the caller can have the wakeup descriptor.
    """
    if not installed():
        return False
    _state.copies = (*_state.copies, descriptor)
    return True


def set_report(report: Report | None) -> None:
    """Set what the last line says after "stopped by Ctrl-C", such as where the run resumes."""
    _state.report = report


@contextmanager
def cooperating(stop: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
    """Call `stop` at Ctrl-C, in a thread, with the seconds that the block then has to end; `pressed` is true by then.

    After the limit the process ends wherever it is, with the cleanups and the report.
    """
    before = _state.stops
    _state.stops = (*before, stop)
    try:
        yield
    finally:
        _state.stops = before


@contextmanager
def raising() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at Ctrl-C, for blocks that clean up in Python within the limit."""
    _state.raising += 1
    try:
        yield
    finally:
        _state.raising -= 1


@contextmanager
def cleanup(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` if Ctrl-C ends the process inside the block. It must take milliseconds."""
    with _writing:
        _state.cleanups = (*_state.cleanups, function)
    try:
        yield
    finally:
        with _writing:
            _state.cleanups = tuple(one for one in _state.cleanups if one is not function)


@contextmanager
def children_without_ctrl_c() -> Iterator[None]:
    """Start child processes in which SIGINT stays blocked; they end with this process by other means.

    The terminal sends Ctrl-C to all processes of the group, and a child that is still importing would answer with a
    traceback. Signals are blocked per thread and inherited, so no Ctrl-C of this process is lost if another thread
    can take it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def announce(text: str) -> None:
    """Print a line to stderr without waiting for its reader, for the `stop` of `cooperating`."""
    line = f"\n{text}\n".encode(errors="backslashreplace")
    threading.Thread(target=os.write, args=(2, line), name="ctrl-c-announce", daemon=True).start()


def end() -> NoReturn:
    """End the process with 130, from any thread: cleanups, what was printed, and the report, if there is time."""
    _end(words=True)


def finish(code: int) -> NoReturn:
    """End the process after its command: exit functions, then `os._exit`.

    The interpreter is not finalized: it would restore the default handler of SIGINT, and XLA's threads can crash it.
    """
    if not pressed():
        with suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as at any exit of Python
        import atexit

        atexit._run_exitfuncs()
    _flush()
    if pressed():
        _run_cleanups()
        _last_words()
    os._exit(EXIT_CODE if pressed() else code)


def _watch(reader: int) -> None:
    while True:
        deadline = _state.deadline
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], seconds)[0]:
            if _state.deadline is not None and time.monotonic() >= _state.deadline:
                _end(words=True)
            continue
        numbers = os.read(reader, 256)
        for descriptor in _state.copies:
            with suppress(OSError):
                os.write(descriptor, numbers)
        for _ in range(numbers.count(signal.SIGINT)):
            _pressed()


def _pressed() -> None:
    if not _state.presses:
        _state.since = time.monotonic()
    _state.presses += 1
    if _state.presses > 1:
        _end(words=False)
    if not _state.raising and not _state.stops:
        _end(words=True)
    _state.deadline = time.monotonic() + LIMIT_SECONDS
    for stop in _state.stops:
        stop(LIMIT_SECONDS)


def _in_main_thread(number: int, frame: FrameType | None) -> None:
    """Run as Python's handler of SIGINT; the watching thread does the rest."""
    if not _state.raising:
        return
    # The block may call `handled` within microseconds, and must not do that before the press is counted.
    counted_by = time.monotonic() + COUNT_SECONDS
    while not _state.presses and time.monotonic() < counted_by:
        time.sleep(0.001)
    raise KeyboardInterrupt


def _end(words: bool) -> NoReturn:
    """End the process. The last steps run in another thread, because any of them may block."""

    def last_steps() -> None:
        _run_cleanups()
        _flush()
        if words:
            _last_words()

    thread = threading.Thread(target=last_steps, name="ctrl-c-end", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        left = _state.since + END_SECONDS - time.monotonic()
        thread.join(max(END_AGAIN_SECONDS, left) if words else END_AGAIN_SECONDS)
    os._exit(EXIT_CODE)


def _run_cleanups() -> None:
    for function in reversed(_state.cleanups):
        with suppress(Exception):
            function()


def _last_words() -> None:
    """Print the last line. Nothing may take time after it: a save in the background could still be committed."""
    report = ""
    if _state.report is not None:
        with suppress(Exception):
            report = _state.report()
    text = "\nstopped by Ctrl-C" + (f": {report}" if report else "") + "\n"
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader is gone
            stream.flush()
