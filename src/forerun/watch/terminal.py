"""`forerun watch` in a terminal: draws the dashboard until q or Ctrl-C, and prints lines if there is no terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TextIO

from rich.console import Console, Group

from forerun.console import SafeConsole, SafeLive
from forerun.errors import StorageError, UserError
from forerun.interrupt import cleanup
from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunState, RunStatus, is_starting, status_of
from forerun.reporter import Reporter
from forerun.safe_text import clean
from forerun.units import Seconds
from forerun.watch.dashboard import dashboard, plain_line
from forerun.watch.run_reader import RunReader

OVER = (RunState.FINISHED, RunState.STOPPED, RunState.INTERRUPTED, RunState.NOT_STARTED)
KEY_SECONDS = 0.2  # the longest time until a key is read
LEAVE_SCREEN = b"\x1b[?1049l"
QUIT_KEYS = b"qQ\x04"  # the last one is Ctrl-D


class RunView:
    """The newest records of a run and their status. A failed read keeps the last records and shows the reason."""

    def __init__(self, reader: RunReader, clock: Callable[[], float] = time.time) -> None:
        self._reader, self._clock = reader, clock
        self.record: RunRecord = reader.read()
        self.trouble = ""

    def refresh(self) -> None:
        """Read what is new. A bucket that does not answer, or a folder that was renamed, is not an error here."""
        try:
            self.record, self.trouble = self._reader.read(), ""
        except (UserError, StorageError, OSError) as error:
            self.trouble = clean(error.what if isinstance(error, UserError) else str(error))

    @property
    def status(self) -> RunStatus:
        """The status at this moment."""
        return status_of(self.record, self._reader.folder, self._clock())

    def footer(self) -> str:
        """Return the last line of the dashboard."""
        source = self.record.location
        if self._reader.folder is None:
            source += f", the newest checkpoint, every {Seconds(self._reader.every_seconds)}"
        return f"q ends  {source}" + (f"  {self.trouble}" if self.trouble else "")


def wait_for_start(reader: RunReader, end: Event, reporter: Reporter) -> None:
    """Wait until a run that is starting has written its job, or `end` is set. Any other location is not waited for."""
    if reader.folder is None or not is_starting(reader.folder):
        return
    reporter.info(f"{reader.folder} is starting: its job is written after its data is read")
    while is_starting(reader.folder) and not end.wait(KEY_SECONDS):
        pass


def show_once(reader: RunReader, console: Console) -> None:
    """Print one frame."""
    view = RunView(reader)
    for line in dashboard(view.record, view.status, console.width, None):
        console.print(line, no_wrap=True, crop=True)


def show_lines(reader: RunReader, stream: TextIO, end: Event) -> None:
    """Print a line for each change, until the run is finished or stopped, or `end` is set."""
    view = RunView(reader)
    shown = ""
    while True:
        status = view.status
        # The time without news grows all the time, and is not a change.
        key = f"{status.state} {status.detail} {view.record.step} {len(view.record.metrics)} {view.trouble}"
        if key != shown:
            shown = key
            stream.write(clean(plain_line(view.record, status)) + (f"  {view.trouble}" if view.trouble else "") + "\n")
            stream.flush()
        if status.state in OVER or end.wait(reader.every_seconds):
            return
        view.refresh()


def show_live(reader: RunReader, console: SafeConsole, end: Event) -> None:
    """Draw the dashboard until a key of `QUIT_KEYS` is pressed or `end` is set."""
    view = RunView(reader)

    def frame() -> Group:
        return Group(*dashboard(view.record, view.status, console.width, console.height, view.footer()))

    next_read = time.monotonic() + reader.every_seconds
    with cleanup(lambda: _leave_screen(console)), keys() as pressed:
        live = SafeLive(console=console, get_renderable=frame, refresh_per_second=4, screen=True, auto_refresh=False)
        with live:
            while not end.is_set():
                live.refresh()
                if pressed(KEY_SECONDS):
                    break
                if time.monotonic() >= next_read:
                    view.refresh()
                    next_read = time.monotonic() + reader.every_seconds
    console.print(plain_line(view.record, view.status))


@contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds and returns whether a key of `QUIT_KEYS` was pressed.

    Keys are read without Return and are not shown. If stdin is not a terminal, the function only waits.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield _only_wait
        return

    def restore() -> None:
        with suppress(termios.error, OSError):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        content = os.read(descriptor, 64)
        return not content or any(key in QUIT_KEYS for key in content)

    with cleanup(restore):
        try:
            tty.setcbreak(descriptor)
            yield pressed
        finally:
            restore()


def _only_wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _leave_screen(console: SafeConsole) -> None:
    """Show the normal screen again when a second Ctrl-C ends the process. This does not use rich's locks."""
    with suppress(OSError, ValueError):
        os.write(console.file.fileno(), LEAVE_SCREEN)
