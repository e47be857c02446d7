from __future__ import annotations

import io
import queue
import re
import sys
import threading

import pytest

from forerun.reporter import HEARTBEAT_SECONDS, SILENT, LineReporter, Reporter, StepView
from forerun.track.display.make_display import make_display


class Clock:
    """Time stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view(step: int, steps: int = 1000, *, mfu: float | None = 0.423) -> StepView:
    return StepView(step, steps, 2.34567, 123_456.7, mfu, 754.0, 0.0031, 3e-4, 0.8123)


def screen(stream: io.StringIO) -> list[str]:
    """The lines that were drawn last, without colours and cursor movements."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.fixture(params=["plain", "terminal"])
def shown(request: pytest.FixtureRequest, terminal: Terminal) -> tuple[Reporter, io.StringIO, Clock]:
    stream = terminal if request.param == "terminal" else io.StringIO()
    clock = Clock()
    return make_display(stream, clock=clock), stream, clock


def test_a_pipe_and_a_dumb_terminal_get_plain_lines(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    assert isinstance(make_display(io.StringIO()), LineReporter)
    assert not isinstance(make_display(terminal), LineReporter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(terminal), LineReporter)


def test_a_phase_ends_as_one_line_with_its_time(shown: tuple[Reporter, io.StringIO, Clock]) -> None:
    display, stream, clock = shown
    with display, display.phase("compile", "for 8 devices") as phase:
        clock.now = 12.34
        phase.detail = "cache miss  program 3f2a"
    assert "compile 12.3 s" in screen(stream)[-1]


def test_a_failed_phase_says_so_and_the_error_goes_on(shown: tuple[Reporter, io.StringIO, Clock]) -> None:
    display, stream, clock = shown

    def fail() -> None:
        with display, display.phase("data"):
            clock.now = 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "failed after 2.0" in screen(stream)[-1]


def test_texts_are_printed_as_they_stand(shown: tuple[Reporter, io.StringIO, Clock]) -> None:
    display, stream, _ = shown
    with display:
        display.info("shape [bold]float32[4,8][/bold]")
        display.warn("slow")
    assert screen(stream) == ["shape [bold]float32[4,8][/bold]", "warning: slow"]


def test_plain_lines_come_first_last_every_tenth_and_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    display = make_display(stream, clock=clock)
    for step in range(1, 1001):
        clock.now += 1.0 if step < 35 else 0.001
        display.step(view(step))
    lines = stream.getvalue().splitlines()
    told = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert told == [1, 11, 21, 31, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert lines[1] == (
        "step 11/1000  loss 2.3457  123k tok/s  MFU 42.3%  data wait 0.3%  lr 3.00e-04  grad 0.812  eta 12 min 34 s"
    )
    assert lines[-1].endswith("done")


def test_without_a_known_peak_there_is_no_mfu() -> None:
    stream = io.StringIO()
    make_display(stream).step(view(1, mfu=None))
    assert "MFU" not in stream.getvalue()


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (120, "loss 2.3457 ▁                 123k tok/s  MFU 42.3%  data wait 0.3%  lr 3.00e-04  grad 0.812"),
        (80, "loss 2.3457 ▁                 123k tok/s  MFU 42.3%  data wait 0.3%  lr 3.00e-04"),
        (40, "loss 2.3457 ▁                 123k tok/s"),
    ],
)
def test_the_live_lines_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: Terminal, columns: int, figures: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with make_display(terminal) as display:
        display.step(view(500))
    bar, line = screen(terminal)[-2:]
    assert line == figures
    assert bar.startswith("step  500/1000  50% ━")
    assert bar.endswith("─ eta 12 min 34 s")
    assert bar.count("━") == bar.count("─")
    assert max(len(bar), len(line)) <= columns


@pytest.mark.timing
def test_steps_are_drawn_by_the_clock_and_not_by_the_loop(terminal: Terminal) -> None:
    with make_display(terminal) as display:
        for step in range(1, 1001):
            display.step(view(step))
        drawn_in_the_loop = terminal.getvalue().count("tok/s")
    assert drawn_in_the_loop < 500  # by the loop a thousand; by the clock four a second, if it takes so long
    assert screen(terminal)[-2].startswith("step 1000/1000 100% ")
    assert screen(terminal)[-2].endswith(" done")


def test_the_standard_streams_are_given_back(terminal: Terminal) -> None:
    before = sys.stdout, sys.stderr
    with make_display(terminal) as display:
        display.step(view(1))
    assert (sys.stdout, sys.stderr) == before
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is visible again


class Intervals:
    """An event whose time is controlled: `pass_one` ends one interval and returns after its line was printed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._endings: queue.Queue[bool] = queue.Queue()
        self._waiting = threading.Semaphore(0)
        self.was_set = False

    def set(self) -> None:
        self.was_set = True
        self._endings.put(True)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == HEARTBEAT_SECONDS
        self._waiting.release()
        return self._endings.get()

    def pass_one(self) -> None:
        self._waiting.acquire()
        self._clock.now += HEARTBEAT_SECONDS
        self._endings.put(False)
        self._waiting.acquire()  # the thread waits again, so the line is printed
        self._waiting.release()


@pytest.fixture
def watched() -> tuple[LineReporter, io.StringIO, Clock, list[Intervals]]:
    stream, clock, made = io.StringIO(), Clock(), []

    def new_end() -> Intervals:
        made.append(Intervals(clock))
        return made[-1]

    return LineReporter(stream, clock=clock, new_end=new_end), stream, clock, made


def test_a_long_phase_prints_its_time_every_interval(
    watched: tuple[LineReporter, io.StringIO, Clock, list[Intervals]],
) -> None:
    display, stream, clock, made = watched
    with display.phase("compile") as phase:
        made[0].pass_one()
        phase.expected_seconds, phase.detail = 75.0, "cache miss"
        made[0].pass_one()
        clock.now += 3.0
    assert stream.getvalue().splitlines() == [
        "compile ...",
        "compile ... 30.0 s so far",
        "compile ... 60.0 s so far, 75.0 s last time  cache miss",
        "compile 63.0 s  cache miss",
    ]
    assert made[0].was_set


def test_a_short_phase_prints_no_heartbeat_and_leaves_no_thread(
    watched: tuple[LineReporter, io.StringIO, Clock, list[Intervals]],
) -> None:
    display, stream, _, _ = watched
    before = threading.active_count()
    with display.phase("data"):
        pass
    assert threading.active_count() == before
    assert len(stream.getvalue().splitlines()) == 2


def test_a_phase_that_fails_ends_its_thread(watched: tuple[LineReporter, io.StringIO, Clock, list[Intervals]]) -> None:
    display, stream, _, made = watched
    before = threading.active_count()

    def fail() -> None:
        with display.phase("state"):
            made[0].pass_one()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert threading.active_count() == before
    assert stream.getvalue().splitlines()[-1] == "state failed after 30.0 s"


def test_progress_is_shown_on_the_stream_of_the_lines() -> None:
    stream = io.StringIO()
    with LineReporter(stream).progress("rows", 10, 4) as progress:
        progress.update(10, "7 rows/s")
    assert stream.getvalue().startswith("10/10 rows, 7 rows/s, ")


def test_a_silent_reporter_accepts_everything() -> None:
    with SILENT as reporter, reporter.phase("data", "of a job") as phase, reporter.progress("rows", 2) as progress:
        phase.detail = "cache miss"
        progress.update(1, "slow")
        reporter.info("text")
        reporter.warn("text")
        reporter.step(view(1))
    assert (phase.name, phase.detail) == ("data", "cache miss")
