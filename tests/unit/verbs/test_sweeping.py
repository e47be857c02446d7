"""`fr.sweep` with a job from Python. tests/e2e/test_sweep_page.py trains one."""

from __future__ import annotations

from pathlib import Path

import pytest

import forerun as fr
from forerun.verbs.sweep import run_sweep


def test_a_job_from_python_is_written_next_to_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[run_sweep.PreparedSweep] = []

    def keep(sweep: run_sweep.PreparedSweep, say: object, *, stop_on_failure: bool) -> run_sweep.SweepResults:
        trained.append(sweep)
        return sweep.results()

    monkeypatch.setattr(run_sweep, "train", keep)
    job = fr.Job(name="small", model={"layers": 1, "embed": 16, "heads": 2}, data="texts", steps=2, runs="runs")
    result = fr.sweep(job, "optimizer.lr=1e-5,3e-5", "batch=4")
    [sweep] = trained
    assert result.folder == tmp_path / "runs/small-sweep"
    assert fr.load_job(sweep.path).data.path == str(tmp_path / "texts"), "the processes have the same paths"
    assert [(run.job.name, run.job.optimizer.lr, run.job.batch) for run in sweep.runs] == [
        ("small-lr-1e-05", 1e-5, 4),
        ("small-lr-3e-05", 3e-5, 4),
    ]
    assert result.best is None
    assert result.table["state"] == ["waiting", "waiting"]
    assert {path.name for path in result.folder.iterdir()} == {"job.yaml", "sweep.html", "sweep.md"}
