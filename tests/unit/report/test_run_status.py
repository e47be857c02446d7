"""The states of a run, and the list of runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from error_assertions import assert_error
from written_run import START, WrittenRun

import forerun as fr
from forerun.cli.main import main
from forerun.errors import UserError
from forerun.report.run_record import read_run
from forerun.report.run_status import has_process, status_of
from forerun.supervise.run_lock import LOST_SECONDS, lock_file
from forerun.watch.dashboard import eta_text, newest_values
from forerun.watch.run_list import list_runs


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "runs")


def state(run: WrittenRun, seconds: float, *, bucket: bool = False) -> tuple[str, str]:
    """The state and the detail `seconds` after the start."""
    found = status_of(read_run(run.path), None if bucket else run.path, START + seconds)
    return str(found.state), found.detail


def locked(run: WrittenRun, monkeypatch: pytest.MonkeyPatch, alive: bool = True) -> None:
    monkeypatch.setattr("forerun.report.run_status.has_process", lambda *given: alive)


def test_a_process_that_compiles_is_waiting_however_long(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(run, monkeypatch)
    assert state(run, 0) == ("waiting", "start")
    run.event("start", 0)
    run.event("phase", 1, name="data")
    assert state(run, 1) == ("waiting", "data")
    run.event("phase", 2, name="compile")
    assert state(run, 5000) == ("waiting", "compile")
    run.event("phase", 3, name="steps")
    run.steps(1, 4)
    assert state(run, 10) == ("running", "")
    run.event("start", 20)
    run.event("phase", 21, name="restore")
    assert state(run, 22) == ("waiting", "restore")


def test_a_process_without_rows_for_a_minute_is_silent(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(run, monkeypatch)
    run.steps(1, 4)  # the last one is 8 s after the start
    assert state(run, 67) == ("running", "")
    assert state(run, 69) == ("silent", "")
    assert "61.0 s" in str(status_of(read_run(run.path), run.path, START + 69))


def test_slow_steps_are_not_silent(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(run, monkeypatch)
    run.append("metrics.jsonl", *({"step": n, "loss": 1.0, "unix_seconds": START + 100 * n} for n in (1, 2, 3)))
    assert state(run, 300 + 1999) == ("running", "")
    assert state(run, 300 + 2001) == ("silent", "")


def test_without_a_process_a_run_is_stopped(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(run, monkeypatch, alive=False)
    assert state(run, 0) == ("not started", "")
    run.steps(1, 4)
    assert state(run, 9) == ("stopped", "")  # a version without events
    run.event("start", 0)
    assert state(run, 9) == ("interrupted", "")
    run.event("stop", 9, step=4, reason="SIGTERM")
    assert state(run, 10) == ("stopped", "SIGTERM")
    run.write("summary.json", {"steps": 4})
    assert state(run, 10) == ("finished", "")


def test_the_process_that_records_the_end_does_not_count(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in report.html, which the process writes before it ends."""
    locked(run, monkeypatch)
    run.event("start", 0)
    run.steps(1, 10)
    run.event("stop", 21, step=10, reason="asked")
    assert state(run, 21) == ("stopped", "asked")
    run.event("start", 22)
    assert state(run, 22) == ("waiting", "start")
    run.event("end", 23, step=10)
    run.write("summary.json", {"steps": 10})
    assert state(run, 23) == ("finished", "")  # early stopping: the job has 20 steps


def test_a_finished_run_that_is_extended_runs_again(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(1, 10)
    run.write("summary.json", {"steps": 10})
    assert state(run, 21) == ("finished", "")
    locked(run, monkeypatch)
    assert state(run, 21) == ("running", "")  # the job has 20 steps


def test_a_bucket_has_only_ages(run: WrittenRun) -> None:
    run.steps(1, 4)
    assert state(run, 9, bucket=True) == ("running", "")
    assert state(run, 900, bucket=True) == ("silent", "")


def test_the_lock_file_of_a_process_that_ended_does_not_count(run: WrittenRun) -> None:
    now = time.time()
    assert not has_process(run.path, {}, now)
    run.lock()
    assert has_process(run.path, {}, now)
    assert not has_process(run.path, {}, now + LOST_SECONDS + 5)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    content = json.loads(lock_file(run.path).read_text())
    lock_file(run.path).write_text(json.dumps({**content, "pid": ended.pid}))
    os.utime(lock_file(run.path), (now, now))
    assert not has_process(run.path, {}, now)
    lock_file(run.path).write_text(json.dumps({**content, "pid": ended.pid, "host": "another-machine"}))
    os.utime(lock_file(run.path), (now, now))
    assert has_process(run.path, {}, now)


def test_a_supervisor_has_the_run_between_two_workers(run: WrittenRun) -> None:
    assert has_process(run.path, {"unix_seconds": 1000.0}, 1010.0)
    assert not has_process(run.path, {"unix_seconds": 1000.0}, 1100.0)


def test_reading_a_status_takes_no_lock(run: WrittenRun) -> None:
    """A training process that starts in this moment must get the lock."""
    run.lock()
    before = sorted(path.name for path in run.path.parent.iterdir())
    status_of(read_run(run.path), run.path)
    assert sorted(path.name for path in run.path.parent.iterdir()) == before


def test_figures(run: WrittenRun) -> None:
    run.steps(1, 8)
    run.append("metrics.jsonl", {"step": 4, "validation_loss": 2.5}, {"step": 8, "validation_loss": 3.0})
    run.append("metrics.jsonl", {"step": 8, "loss": None, "lr": float("inf")})
    run.append("skips.jsonl", {"step": 5, "why": "loss is not finite"})
    for session, seconds in ((1, 0.0), (2, 5.0)):
        event = {"unix_seconds": START + seconds, "event": "start", "session": session}
        run.append("events.jsonl", event)
    record = read_run(run.path)
    assert dict(newest_values(record)) == {
        "loss": "3.2000",
        "validation": "3.0000 (best 2.5000)",
        "tokens/s": "4.2k",
        "MFU": "37.5%",
        "lr": "3.00e-04",
        "grad norm": "1.25",
        "data wait": "12.5%",
        "memory": "3.00 GiB (peak 5.00 GiB)",
        "restarts": "1",
        "skipped": "1",
    } | {name: value for name, value in newest_values(record) if name == "goodput"}
    assert eta_text(record) == "eta 24.0 s"


def test_runs_lists_states_stages_and_broken_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    old = WrittenRun(runs, "old")
    old.steps(1, 20)
    old.write("summary.json", {"steps": 20})
    new = WrittenRun(runs, "both-first")
    new.append("metrics.jsonl", {"step": 3, "loss": 1.5, "unix_seconds": START + 100})
    new.append("metrics.jsonl", {"step": 3, "validation_loss": 1.75, "unix_seconds": START + 101})
    (runs / "both").mkdir()
    (runs / "both" / "stages.json").write_text(json.dumps({"stages": {"first": "both-first"}}))
    broken = WrittenRun(runs, "broken")
    (broken.path / "job.yaml").write_text("steps: [\n")
    (runs / "notes").mkdir()
    (runs / "file.txt").write_text("text")

    first, second, third = list_runs(runs, START + 141)
    assert (first.name, first.state, first.stages) == ("both-first", "stopped", "both")
    assert (first.step, first.steps, first.loss, first.validation, first.age_seconds) == (3, 20, 1.5, 1.75, 40.0)
    assert (second.name, second.state, second.step, second.age_seconds) == ("old", "finished", 20, 101.0)
    assert (third.name, third.state, third.loss) == ("broken", "broken", None)
    assert "E-JOB-" in third.detail

    assert main(["runs", str(runs), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["both-first", "old", "broken"]
    assert [{**asdict(one), "age_seconds": None} for one in fr.runs(runs)] == [
        {**one, "age_seconds": None} for one in listed
    ]
    assert main(["runs", str(runs)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^both-first +stopped +3/20 +1.5000 +1.7500 +\d+ days +both *$", table, re.M)
    assert re.search(r"^broken: .*E-JOB-", table, re.M)


def test_a_missing_folder_is_an_error_and_an_empty_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        list_runs(tmp_path / "none")
    assert_error(caught.value, "E-WATCH-001", what="none")
    assert list_runs(tmp_path) == ()
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out
