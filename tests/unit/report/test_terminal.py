"""Reports in the terminal: at 80 and 120 columns, and as plain text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from run_records import CPU, JOB, START, metrics_rows, write_run

from forerun.console import SafeConsole
from forerun.report.comparison import compare_records
from forerun.report.run_facts import run_facts
from forerun.report.run_record import read_run
from forerun.report.terminal import print_comparison, print_report

SAMPLE = {"step": 20, "samples": [{"prompt": "It", "text": " was \x1b[2J[bold]"}], "unix_seconds": START + 20}
SUMMARY = {"steps": 20, "device": CPU, "versions": {"jax": "0.10.2"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    resume = {"unix_seconds": START + 9, "event": "resume", "session": 2, "step": 8}
    skip = {"step": 3, "why": "loss nan"}
    return write_run(tmp_path / "short", [*metrics_rows(), SAMPLE], summary=SUMMARY, events=[resume], skips=[skip])


def printed(folder: Path, columns: int) -> str:
    stream = io.StringIO()
    record = read_run(folder)
    print_report(SafeConsole(file=stream, width=columns), record, run_facts(record))
    return stream.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_has_the_results_in_the_width(folder: Path, columns: int) -> None:
    text = printed(folder, columns)
    assert max(map(len, text.splitlines())) <= columns
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert "3.0000" in lines["final loss"]
    assert "3.5000" in lines["best validation"]
    assert "at step 8" in text
    assert "0.10.2" in lines["jax"]
    assert "not known for CPU" in text


def test_plain_text_has_no_control_sequences(folder: Path) -> None:
    assert "\x1b" not in printed(folder, 100)
    assert "[bold]" in printed(folder, 100)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_comparison_has_all_runs(folder: Path, tmp_path: Path, columns: int) -> None:
    other = write_run(tmp_path / "other", metrics_rows(), job=JOB + "batch: 64\n")
    stream = io.StringIO()
    found = compare_records([read_run(folder), read_run(other)])
    print_comparison(SafeConsole(file=stream, width=columns), found)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    assert ["batch", "32", "64"] in [line.split() for line in text.splitlines()]
