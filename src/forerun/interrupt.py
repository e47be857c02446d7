"""Ctrl-C in commands: the first one stops within two seconds, the second one immediately, both with exit code 130.

Python runs signal handlers in the main thread, and only between two bytecodes. A compilation, a collective or a slow
read would delay them for as long as it takes, and ending the interpreter while XLA's threads run can crash. So a daemon
thread reads the signals (`signal.set_wakeup_fd`) and ends the process with `os._exit`. Python does not run `finally`
blocks then. That is safe, because every file is written so that a kill at any moment leaves it complete or absent.

A phase that can do better uses one of these:

- `cooperating`: a function of the phase is called, and the phase has `LIMIT_SECONDS` to end on its own. Training saves
  a checkpoint in this time.
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

from forerun.exit_codes import INTERRUPTED

LIMIT_SECONDS = 1.3  # for a phase that stops on its own
# Limits for the cleanups and the last message: a full pipe or a slow disk must not delay the end.
END_SECONDS = 1.6  # after the first press
END_AGAIN_SECONDS = 0.3  # after the second press
COUNT_SECONDS = 0.5  # for the daemon thread to count a press

Report = Callable[[], str]


class _State:
    """The state that threads share. Each field is replaced in one step, so reading needs no lock."""

    def __init__(self) -> None:
        self.writer = -1  # the end of the pipe to which signal numbers are written; -1 before `install`
        self.presses = 0
        self.since = 0.0  # the time of the first press
        self.deadline: float | None = None
        self.stops: tuple[Callable[[float], None], ...] = ()
        self.raising = 0
        self.cleanups: tuple[Callable[[], None], ...] = ()
        self.copies: tuple[int, ...] = ()
        self.report: Report | None = None


_state = _State()
_writing = threading.Lock()  # for `cleanups`, which several threads may change


def install() -> None:
    """Handle Ctrl-C in this process from now on. Main thread only. A SIGINT that is ignored stays ignored."""
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
    """Return whether `install` was called in this process."""
    return _state.writer >= 0


def pressed() -> bool:
    """Return whether Ctrl-C was pressed, and no phase has called `handled` since."""
    return _state.presses > 0


def handled() -> None:
    """Continue after a Ctrl-C that ended only a part of the work, such as one answer of a chat."""
    _state.deadline, _state.presses = None, 0


def copy_signals_to(descriptor: int) -> bool:
    """Write the numbers of all signals to this pipe too, and return True.

    A process has only one wakeup descriptor. Returns False if `install` does not use it, so that the caller can.
    """
    if not installed():
        return False
    _state.copies = (*_state.copies, descriptor)
    return True


def set_report(report: Report | None) -> None:
    """Set the function that returns the text after "stopped by Ctrl-C", such as where the run resumes."""
    _state.report = report


@contextmanager
def cooperating(stop: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
    """Call `stop` in a thread if Ctrl-C is pressed inside the block. `pressed` is already true then.

    The argument of `stop` is the number of seconds that the block has to end. After them the process ends in any case,
    with the cleanups and the report.
    """
    before = _state.stops
    _state.stops = (*before, stop)
    try:
        yield
    finally:
        _state.stops = before


@contextmanager
def raising() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at Ctrl-C. For blocks that clean up in Python within the limit."""
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
    """Block SIGINT in child processes that are started inside the block. They end with this process by other means.

    The terminal sends Ctrl-C to all processes of the group, and a child that is still importing would print a
    traceback. Signals are blocked per thread and inherited. So this process loses no Ctrl-C if another thread can
    receive it.
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
    """End the process with exit code 130, from any thread.

    If there is time, run the cleanups, flush the output and print the report first.
    """
    _end(words=True)


def finish(code: int) -> NoReturn:
    """End the process after its command: run the exit functions, then call `os._exit`.

    The interpreter is not finalized. That would restore the default handler of SIGINT, and XLA's threads can crash it.
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
    os._exit(INTERRUPTED if pressed() else code)


def _watch(reader: int) -> None:
    """Read signals and enforce the deadline, in the daemon thread."""
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
    """Handle one press of Ctrl-C."""
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
    """Raise KeyboardInterrupt inside `raising`. This is Python's handler of SIGINT; the daemon thread does the rest."""
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
    os._exit(INTERRUPTED)


def _run_cleanups() -> None:
    for function in reversed(_state.cleanups):
        with suppress(Exception):
            function()


def _last_words() -> None:
    """Print the last line. The process must end immediately afterwards.

    Otherwise a save in the background could still be committed, and the report would be wrong.
    """
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
