"""Progress of a task: plain lines in a pipe, a bar on a terminal that leaves one line, and nothing on stdout."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from forerun import progress as module
from forerun.progress import ProgressBar, TaskSpeed


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_pace_counts_only_the_work_since_its_start(clock: Clock) -> None:
    pace = TaskSpeed(100, 40)
    assert pace.eta_seconds() is None
    clock.now += 30
    pace.done = 60  # 20 in 30 seconds, so the last 40 take 60
    assert pace.eta_seconds() == 60
    assert pace.spent_seconds == 30


def test_a_pipe_gets_a_line_now_and_then_and_one_at_the_end(clock: Clock) -> None:
    out = io.StringIO()
    with ProgressBar("rows", 8, stream=out) as bar:
        for done in range(1, 9):
            clock.now += 4
            bar.update(done)
    assert out.getvalue().splitlines() == ["3/8 rows, eta 20.0 s", "6/8 rows, eta 8.0 s", "8/8 rows, 32.0 s"]


def test_a_detail_and_work_from_before(clock: Clock) -> None:
    out = io.StringIO()
    with ProgressBar("answers", 10, 6, stream=out, every_seconds=0) as bar:
        clock.now += 2
        bar.update(8, "7 tokens/s")
    assert out.getvalue() == "8/10 answers, 7 tokens/s, eta 2.0 s\n"


PROGRAM = """
import sys
from forerun.progress import ProgressBar
with ProgressBar("rows", 4, stream=sys.stderr, live=sys.argv[1] == "live") as bar:
    for done in (1, 2, 3, 4):
        print('{"answer": %d}' % done, flush=True)
        bar.update(done, "\\x1b[2Jdetail [bold]")
print('{"answer": 5}')
"""


def run_on_terminal(way: str) -> tuple[str, str]:
    """Return stdout, which is a pipe, and stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-P", "-c", PROGRAM, way]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, env=environment) as child:
        os.close(theirs)
        assert child.stdout is not None
        answer = child.stdout.read().decode()
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.returncode == 0
    return answer, shown.decode()


def test_a_bar_on_a_terminal_keeps_stdout_and_filters_text() -> None:
    answer, shown = run_on_terminal("live")
    assert answer == "".join(f'{{"answer": {number}}}\n' for number in range(1, 6))
    assert "━" in shown
    assert "\x1b[2J" not in shown
    assert "[bold]" in shown  # text, not markup
    assert "\x1b[?25h" in shown  # the cursor is visible again
    last = shown.rstrip().splitlines()[-1]
    assert re.search(r"4/4 rows, .*, [\d.]+ m?s$", last)


def test_a_bar_that_is_not_live_draws_nothing() -> None:
    answer, shown = run_on_terminal("plain")
    assert answer.count("answer") == 5
    assert "━" not in shown
    assert "4/4 rows" in shown


def test_rich_is_imported_only_for_a_bar() -> None:
    program = (
        "import io, sys\n"
        "from forerun.progress import ProgressBar\n"
        "with ProgressBar('rows', 1, stream=io.StringIO()) as bar:\n"
        "    bar.update(1)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'rich']"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
