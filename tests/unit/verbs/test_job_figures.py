"""Stored figures give the report that computed figures give, and never that of another job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.resolve.resolved_job import ResolvedJob
from forerun.verbs.check import job_figures

TINY: dict[str, Any] = {"layers": 2, "embed": 64, "heads": 4, "mlp": 128, "vocab": 256}
BASE: dict[str, Any] = {"model": TINY, "data": "text", "steps": 10, "batch": 8, "sequence": 64}
SHAPE = MeshShape(1, 8, 1)


def key(changes: dict[str, Any] | None = None, kind: str = "TPU v5 lite", shape: MeshShape = SHAPE) -> str | None:
    return job_figures.key(ResolvedJob(Job.model_validate(BASE | (changes or {}))), "tpu", kind, shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": TINY | {"layers": 3}},
        {"sequence": 128},
        {"batch": 16},
        {"precision": {"params": "bfloat16"}},
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"ema": 0.9}},
        {"lora": {"rank": 4}},
        {"attention": "xla"},
    ],
)
def test_what_changes_a_figure_changes_the_key(changes: dict[str, Any]) -> None:
    assert key(changes) != key()


def test_place_and_mesh_are_in_the_key() -> None:
    assert len({key(), key(kind="TPU v6 lite"), key(shape=MeshShape(1, 4, 2))}) == 3


@pytest.mark.parametrize("changes", [{"steps": 99}, {"name": "other"}, {"optimizer": {"lr": 0.1}}, {"seed": 5}])
def test_other_values_do_not(changes: dict[str, Any]) -> None:
    assert key(changes) == key()


def test_custom_classes_have_no_key() -> None:
    assert key({"model": "net:Net"}) is None
    assert key({"objective": "mine:Loss"}) is None


def test_a_damaged_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = job_figures.JobFigures(
        5,
        4,
        None,
        256,
        64,
        "xla",
        None,
        job_figures.OptimizerFigures(8, 4, 0),
        (job_figures.TargetFigures("q", "-", "x"),),
    )
    job_figures.store_figures("a", figures)
    assert job_figures.load_figures("a") == figures
    for text in ("", "{", "[]", '{"optimizer": 3}', "{}"):
        (job_figures.folder() / "a.json").write_text(text)
        assert job_figures.load_figures("a") is None
    assert job_figures.load_figures("b") is None
    assert job_figures.load_figures(None) is None


PROGRAM = """
import sys
from forerun.cli.main import main
code = main(sys.argv[1:])
print("jax" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("on", [[], ["--on", "v5e-8"]])
def test_the_second_check_prints_the_same_without_jax(tmp_path: Path, on: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(
        "model: {layers: 2, embed: 64, heads: 4, mlp: 128, vocab: 256}\ndata: text\nsteps: 10\nbatch: 8\n"
        "sequence: 64\noptimizer: {name: muon}\nlora: {rank: 4}\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, "check", "job.yaml", *on]
    runs = [subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True) for _ in "ab"]
    assert runs[0].stdout == runs[1].stdout
    assert [run.stderr.splitlines()[-1] for run in runs] == ["True", "False"]
    assert runs[0].stderr.splitlines()[:-1] == runs[1].stderr.splitlines()[:-1]
