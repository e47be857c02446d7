"""The winning job file: it loads as what was compiled, and says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fit_results import fit_result

from forerun.config.load import load
from forerun.config.schema import Job, Remat
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.planner.search.job_file import MARK, check_path, winning_job, write
from forerun.planner.search.ranking import RankedPlan
from forerun.planner.search.space import Candidate
from forerun.resolve.resolved_job import ResolvedJob

JOB = ResolvedJob(
    Job.model_validate(
        {
            "name": "my-job",
            "model": {"name": "llama3.1-8b", "rope_scaling": {"factor": 4.0}},
            "data": {"path": "/texts/a: b #c", "tokenizer": "/t.json"},
            "sequence": 8192,
            "batch": 24,
            "steps": 1000,
            "optimizer": {"lr": 1e-5, "clip": None},
            "device": ["tpu", "cpu"],
        }
    )
)
KEEP = Remat(policy="named", keep=("attention_out",), offload=("layer_in",))


def found(mesh: str, micro: int, remat: Remat, seconds: float, peak: float, on: str = "v6e-8") -> RankedPlan:
    shape = MeshShape(*(int(side) for side in mesh.split("x")))
    one = Candidate(slice_named(on), shape, micro, remat)
    verdict = fit_result(one.question(JOB), seconds, (peak, 4, 8), tokens_per_step=24 * 8192)
    return RankedPlan(one, verdict, seconds * 1000 / 3600, 20.0, True)


BEST = found("1x8x1", 3, KEEP, 2.87, 27.3)
OTHERS = [
    BEST,
    found("1x8x1", 3, Remat(), 3.12, 28.2),
    found("1x8x1", 1, KEEP, 3.4, 20.0),
    found("1x4x2", 3, KEEP, 3.6, 22.0),
]


def test_loads_as_the_job_that_was_compiled(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write(path, winning_job(JOB, BEST, OTHERS, "cheapest", OTHERS[1]))
    assert load(path).job == BEST.candidate.changed(JOB).job
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.yaml"]


@pytest.mark.parametrize(
    ("device", "on", "written"),
    [
        (["tpu", "cpu"], "h100-8", "gpu"),
        ("cpu", "h100-8", "gpu"),
        ("cpu", "v6e-8", "tpu"),
        (["tpu", "gpu"], "h100-8", ("tpu", "gpu")),
        ("gpu", "h100-8", "gpu"),
        ("auto", "h100-8", "auto"),
    ],
)
def test_the_file_runs_on_the_devices_of_the_plan(device: object, on: str, written: object, tmp_path: Path) -> None:
    wanted = ResolvedJob(Job.model_validate({**JOB.job.model_dump(), "device": device}))
    best = found("1x8x1", 3, KEEP, 2.87, 27.3, on)
    text = winning_job(wanted, best, [best], "cheapest", None)
    write(tmp_path / "best.yaml", text)
    loaded = load(tmp_path / "best.yaml").job
    assert loaded.device == written
    assert loaded.model_copy(update={"device": wanted.job.device}) == best.candidate.changed(wanted).job
    assert f": {on}" in text.splitlines()[1]


def test_reasons() -> None:
    text = winning_job(JOB, BEST, OTHERS, "cheapest", OTHERS[1])
    lines = text.splitlines()
    assert lines[0].startswith(MARK)
    assert "# Slice: v6e-8" in lines
    above = {line.split(":")[0]: lines[n - 1] for n, line in enumerate(lines) if not line.startswith("#") and line}
    assert "micro_batch 3 x" in above["batch"]
    assert "+8.7% time (28.2" in above["remat"]
    assert "3.95 GiB of" in above["remat"]
    assert "1 +18.5% time (20.0 GiB)" in above["micro_batch"]
    assert "1x4x2 +25.4% time" in above["mesh"]
    assert any("The job as written takes 3.12 s" in line for line in lines)
    assert any("8.56k tokens/s per chip" in line for line in lines)


def test_defaults_are_not_written_out() -> None:
    text = winning_job(JOB, BEST, [BEST], "fastest", None)
    keys = {line.split(":")[0] for line in text.splitlines() if line and line[0] not in "# -"}
    assert keys == {
        "name", "device", "model", "data", "sequence", "batch", "micro_batch", "steps", "optimizer", "mesh", "remat",
    }  # fmt: skip
    assert "No plan was found that differs only in mesh" in text


def test_paths_that_are_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: x\n")
    for path, what in (
        (mine, "E-PLAN-023"),
        (tmp_path, "E-PLAN-023"),
        (tmp_path / "no" / "x", "E-PLAN-022"),
    ):
        with pytest.raises(UserError, match=what):
            check_path(path)
    mine.write_text(f"{MARK}: the cheapest plan that it found.\n")
    check_path(mine)
    check_path(tmp_path / "new.yaml")


def test_a_job_with_the_query_of_a_url_is_for_its_owner_only(tmp_path: Path) -> None:
    for name, mode in (("https://host/a.jsonl?download=1", 0o600), ("https://host/a.jsonl", 0o644)):
        path = tmp_path / "best.yaml"
        path.unlink(missing_ok=True)
        umask = os.umask(0o022)
        try:
            write(path, f"{MARK}\ndata: {name}\n")
        finally:
            os.umask(umask)
        assert path.stat().st_mode & 0o777 == mode
        assert name in path.read_text()
