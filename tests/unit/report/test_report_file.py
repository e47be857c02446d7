"""The file report.html of a real run, and what happens if it cannot be written."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter
from run_records import PageContent, metrics_rows, write_run

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.report import page as page_module
from forerun.report.page import write_report
from forerun.report.run_record import read_run
from forerun.reporter import LineReporter
from forerun.run.train import train
from forerun.run_folder.run_folder import RunFolder


def test_a_real_run_ends_with_its_report(make_job: Callable[..., Job]) -> None:
    job = make_job("steps=4")
    with LineReporter(io.StringIO(), clock=time.monotonic) as display:
        train(job, display)
    folder = Path(job.runs) / job.name
    found = PageContent((folder / "report.html").read_text())
    assert "finished" in found.texts
    losses = read_run(folder).points("loss")
    assert found.curves("Loss")["loss"] == [pytest.approx(point, abs=1e-3) for point in losses]
    assert len(losses) == 4


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path / "run", metrics_rows()))
    job, told = load(folder.job).job, list[str]()
    (folder.path / "report.html").mkdir()
    write_report(folder, job, RecordingReporter(told))
    assert len(told) == 1
    assert str(folder.path / "report.html") in told[0]


def test_a_stopped_run_with_many_rows_has_no_time_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(write_run(tmp_path / "run", metrics_rows()))
    job, told = load(folder.job).job, list[str]()
    write_report(folder, job, RecordingReporter(told), stopped=True)
    assert (folder.path / "report.html").is_file()
    (folder.path / "report.html").unlink()
    monkeypatch.setattr(page_module, "MAX_STOPPED_BYTES", 100)
    write_report(folder, job, RecordingReporter(told), stopped=True)
    assert not (folder.path / "report.html").exists()
    assert told == []
