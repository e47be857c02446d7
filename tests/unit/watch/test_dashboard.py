"""The dashboard: its values at several sizes, its charts, and the lines for outputs that are not terminals."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import termios
import threading
from pathlib import Path

import pytest
from recording_reporter import CallingReporter, RecordingReporter
from written_run import START, WrittenRun

from forerun.cli.main import main
from forerun.console import SafeConsole
from forerun.report.run_record import RunRecord, read_run
from forerun.report.run_status import RunState, RunStatus
from forerun.watch import terminal
from forerun.watch.dashboard import braille_chart, dashboard
from forerun.watch.run_reader import FolderReader

RUNNING = RunStatus(RunState.RUNNING, "", 1.5)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "runs")


@pytest.fixture
def record(run: WrittenRun) -> RunRecord:
    run.steps(1, 8)
    run.append("metrics.jsonl", {"step": 4, "validation_loss": 2.5}, {"step": 8, "validation_loss": 3.0})
    run.append("metrics.jsonl", {"step": 8, "samples": [{"prompt": "It was", "text": " the best\nof times"}]})
    hosts = [
        {"name": "vm-0", "step": 8, "lag": 0, "memory_bytes": 3 << 30, "memory_limit_bytes": 16 << 30},
        {"name": "vm-1", "step": 6, "lag": 2, "memory_bytes": 2 << 30, "age_seconds": 4.0},
    ]
    run.write("hosts.json", {"unix_seconds": START, "hosts": hosts})
    return read_run(run.path)


def printed(record: RunRecord, width: int, height: int | None, status: RunStatus = RUNNING) -> list[str]:
    """The lines as a terminal of this size shows them."""
    console = SafeConsole(file=io.StringIO(), width=width, record=True)
    for line in dashboard(record, status, width, height, "q ends"):
        console.print(line, no_wrap=True)
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (80, None)])
def test_all_values_are_shown(record: RunRecord, width: int, height: int | None) -> None:
    lines = printed(record, width, height)
    text = "\n".join(lines)
    assert lines[0].split()[:3] == ["short", "●", "running"]
    assert lines[1].startswith("step 8/20  40% ━")
    assert lines[1].endswith("eta 24.0 s")
    for value in ("loss 3.2000", "validation 3.0000 (best", "tokens/s 4.2k", "MFU 37.5%", "lr 3.00e-04"):
        assert value in text, value
    for value in ("grad norm 1.25", "data wait 12.5%", "memory 3.00 GiB (peak", "skipped 0"):
        assert value in text, value
    assert "step 8: It" in text
    rows = [line.split() for line in lines if line.startswith("vm-")]
    assert rows == [
        ["vm-0", "8", "0", "3.00", "GiB", "/", "16.00", "GiB"],
        ["vm-1", "6", "2", "2.00", "GiB", "4.0", "s"],
    ]
    assert lines[-1] == "q ends"
    assert max(map(len, lines)) <= width
    assert height is None or len(lines) <= height


def test_a_wide_terminal_has_more_charts(record: RunRecord) -> None:
    titles = {width: next(line for line in printed(record, width, 40) if "validation" in line) for width in (80, 120)}
    assert titles[80].split() == ["loss", "validation"]
    assert titles[120].split() == ["loss", "validation", "grad", "norm"]


@pytest.mark.parametrize("height", range(1, 31))
@pytest.mark.parametrize("width", [20, 80])
def test_a_frame_never_exceeds_its_terminal(record: RunRecord, width: int, height: int) -> None:
    lines = dashboard(record, RUNNING, width, height, "q ends")
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width


def test_a_low_terminal_keeps_the_values(record: RunRecord) -> None:
    text = "\n".join(printed(record, 80, 8))
    assert "loss 3.2000" in text
    assert "sample at step" not in text


def test_a_run_without_rows_and_a_silent_one(run: WrittenRun) -> None:
    record = read_run(run.path)
    lines = printed(record, 80, 24, RunStatus(RunState.WAITING, "compile"))
    assert "waiting (compile)" in lines[0]
    assert lines[1].startswith("step 0/20   0%")
    assert "2 min 05" in printed(record, 80, 24, RunStatus(RunState.SILENT, "", 125.0))[0]


def test_texts_of_a_run_cannot_control_the_terminal(run: WrittenRun) -> None:
    run.append("metrics.jsonl", {"step": 1, "loss": 1.0, "samples": [{"prompt": "\x1b[2J", "text": "[bold]x"}]})
    run.write("hosts.json", {"hosts": [{"name": "\x1b]0;title\x07"}, {"name": "[red]b"}]})
    console = SafeConsole(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    for line in dashboard(read_run(run.path), RUNNING, 80, 24):
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "[bold]x" in shown


def test_many_hosts_are_the_slowest_ones(run: WrittenRun) -> None:
    hosts = [{"name": f"vm-{n}", "step": 100 - n, "lag": n} for n in range(32)]
    run.write("hosts.json", {"hosts": hosts})
    lines = printed(read_run(run.path), 80, 40)
    assert [line.split()[0] for line in lines if line.startswith("vm-")] == [f"vm-{n}" for n in range(31, 23, -1)]
    assert any("24 other hosts" in line for line in lines)


def test_a_chart_has_its_points_where_they_belong() -> None:
    chart = braille_chart([(0, 0.0), (1, 3.0)], 1, 1, joined=False)
    assert (chart.lines, chart.low, chart.high) == ((chr(0x2800 + 0x40 + 0x08),), 0.0, 3.0)  # lower left, upper right
    falling = braille_chart([(n, 10.0 - n) for n in range(11)], 10, 4)
    heights = [next(row for row in range(4) if falling.lines[row][column] != "⠀") for column in range(10)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0, 3)
    assert braille_chart([], 3, 2).lines == ("⠀⠀⠀", "⠀⠀⠀")
    nan = braille_chart([(0, float("nan")), (1, 2.0)], 3, 2)
    assert (nan.low, nan.high) == (2.0, 2.0)


def test_lines_of_a_run_that_advances_and_ends(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.report.run_status.has_process", lambda *given: True)
    run.steps(1, 2)
    reader, out = FolderReader(run.path), io.StringIO()
    reader.every_seconds = 0.0
    # Each read finds the next state, as if a process had written it in between.
    read, last_steps = reader.read, [20, 3, 2]

    def next_read() -> RunRecord:
        if len(last_steps) > 1:
            last_steps.pop()
            record = read()
            run.steps(record.step + 1, last_steps[-1])
            if last_steps == [20]:
                run.write("summary.json", {"steps": 20})
            return record
        return read()

    monkeypatch.setattr(reader, "read", next_read)
    terminal.show_lines(reader, out, threading.Event())
    steps = [line.split("step ")[1].split()[0] for line in out.getvalue().splitlines()]
    assert steps == ["2/20", "3/20", "20/20"]
    assert "finished" in out.getvalue().splitlines()[-1]


def test_once_prints_a_frame_and_a_pipe_gets_lines(run: WrittenRun, record: RunRecord, capsys: Capture) -> None:
    assert main(["watch", str(run.path), "--once"]) == 0
    assert "loss 3.2000" in capsys.readouterr().out
    assert main(["watch", str(run.path)]) == 0  # without a process the run is stopped, so this ends
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["short", "stopped", "step", "8/20"]


def test_a_run_that_is_starting_is_waited_for(run: WrittenRun) -> None:
    job, said = run.path / "job.yaml", list[str]()
    text = job.read_text()
    terminal.wait_for_start(FolderReader(run.path), threading.Event(), RecordingReporter(said))
    job.unlink()
    terminal.wait_for_start(FolderReader(run.path), threading.Event(), RecordingReporter(said))
    assert said == []  # no process has the run
    run.lock()

    def start(said_text: str) -> None:
        job.write_text(text)

    terminal.wait_for_start(FolderReader(run.path), threading.Event(), CallingReporter(start))
    job.unlink()
    end = threading.Event()
    end.set()
    terminal.wait_for_start(FolderReader(run.path), end, RecordingReporter(said))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("words", "code"), [(["--port", "80"], "E-WATCH-002"), (["--web", "--once"], "E-WATCH-003"), ([], "E-RUN-020")]
)
def test_mistakes(tmp_path: Path, words: list[str], code: str, capsys: Capture) -> None:
    assert main(["watch", str(tmp_path), *words]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_the_key_q_ends_and_restores_the_terminal(
    run: WrittenRun, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real pseudo-terminal gives the key and receives the frames."""
    master, slave = pty.openpty()
    before, shown, is_pressed = termios.tcgetattr(slave), bytearray(), False
    with open(slave, "w", encoding="utf-8", closefd=False) as out, open(slave, encoding="utf-8", closefd=False) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        console = SafeConsole(file=out, force_terminal=True, width=80, height=24)
        view = threading.Thread(target=terminal.show_live, args=(FolderReader(run.path), console, threading.Event()))
        view.start()
        while view.is_alive() or select.select([master], [], [], 0.05)[0]:
            if select.select([master], [], [], 0.05)[0]:
                shown += os.read(master, 1 << 16)
            if b"grad norm" in shown and not is_pressed:
                is_pressed = os.write(master, b"xq") == 2
    view.join()
    assert termios.tcgetattr(slave) == before
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    os.close(master)
    os.close(slave)
