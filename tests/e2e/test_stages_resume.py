"""Real processes that are killed inside the stages of a file: the same command continues, equal to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import PATIENCE_SECONDS, Bench, Run
from safetensors.numpy import load_file

from forerun.checkpoint.reader import Reader
from forerun.track.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timing]

JOB = """\
model: {{layers: 1, embed: 32, heads: 2, mlp: 64}}
data: tale.txt
sequence: 16
batch: 8
device: cpu
optimizer: {{lr: 1e-2}}
precision: {{compute: float32}}
remat: none
checkpoint: {{every: {every}}}
sample: {{tokens: 0}}
stages:
  qat: {{qat: {{weights: int4, group: 16}}, steps: 5}}
  recovery: {{lora: {{rank: 2, alpha: 4}}, steps: {steps}}}
"""
FIRST, SECOND = 5, 9


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("stages") / "bench", steps=SECOND, every=2, job=JOB)
    (bench.folder / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    return bench


def kill_in(stage: Path, step: int, run: Run) -> None:
    """Kill the run after a checkpoint of `stage`. Step `step` does not begin while the process is alive."""
    with run.bench.held_back(step, 99, step_seconds=PATIENCE_SECONDS):
        run.start(devices=1)
        assert run.wait_for(lambda: (stage / "checkpoints").is_dir() and Reader(stage / "checkpoints").steps())
        run.kill(run.worker())
    assert not (stage / "summary.json").exists()


def losses(run: Path, steps: int) -> list[str]:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["loss"].hex() for row in rows]


def test_the_same_command_continues_after_kills_in_both_stages(bench: Bench) -> None:
    """The last process has a supervisor, which starts a worker for each stage."""
    runs = bench.folder / "runs"
    with bench.run("whole") as run:
        run.start(devices=1)
        run.finish()
    with bench.run("killed") as run:
        # The brake counts steps of any stage. Only the second stage has steps after FIRST.
        kill_in(runs / "killed-qat", 4, run)
        assert not (runs / "killed-qat/model").exists()
        kill_in(runs / "killed-recovery", FIRST + 1, run)
        result = runs / "killed-qat/model"
        stage_one = (runs / "killed-qat/metrics.jsonl").stat().st_mtime_ns
        before = {name: tensor.tobytes() for name, tensor in load_file(result / "model.safetensors").items()}
        # A kill while the result is written leaves no record of it, and perhaps half a folder.
        (result.parent / "model-result.json").unlink()
        (result / "model.safetensors").unlink()
        (runs / "killed-qat/.model.part").mkdir()
        run.start(devices=1, supervise=True)
        run.finish()
    assert {name: tensor.tobytes() for name, tensor in load_file(result / "model.safetensors").items()} == before
    assert (runs / "killed-qat/metrics.jsonl").stat().st_mtime_ns == stage_one  # the first stage was not run again
    for stage, steps in (("qat", FIRST), ("recovery", SECOND)):
        assert losses(runs / f"killed-{stage}", steps) == losses(runs / f"whole-{stage}", steps)
        digests = [Reader(runs / f"{name}-{stage}/checkpoints").record(steps)["base"] for name in ("killed", "whole")]
        assert digests[0] == digests[1]
    assert json.loads((runs / "killed/stages.json").read_text()) == {
        "stages": {"qat": "killed-qat", "recovery": "killed-recovery"}
    }
