"""Real processes that are killed inside the stages of a file: the same command continues, equal to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from forerun.checkpoint.reader import Reader
from forerun.track.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timing]

PATIENCE_SECONDS = 600
ROOT = Path(__file__).resolve().parents[2]
JOB = """\
model: {layers: 1, embed: 32, heads: 2, mlp: 64}
data: tale.txt
sequence: 16
batch: 8
device: cpu
optimizer: {lr: 1e-2}
precision: {compute: float32}
remat: none
checkpoint: {every: 2}
sample: {tokens: 0}
stages:
  qat: {qat: {weights: int4, group: 16}, steps: 5}
  recovery: {lora: {rank: 2, alpha: 4}, steps: 9}
"""
FIRST, SECOND = 5, 9

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stages")
    (made / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (made / "job.yaml").write_text(JOB)
    return made


@pytest.fixture(scope="module")
def start(folder: Path, shell: dict[str, str]) -> Start:
    """`forerun train` as a process of its own, with the brake of tests/faults/brake."""
    paths = [str(ROOT / "tests/faults/brake"), str(ROOT / "src")]
    environment = {**shell, "PYTHONPATH": os.pathsep.join(paths), "FORERUN_TEST_BRAKE": str(folder / "brake")}

    def begin(name: str, *options: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "forerun", "train", "job.yaml", f"name={name}", *options]
        with (folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)

    return begin


def finish(start: Start, folder: Path, name: str, *options: str) -> None:
    child = start(name, *options)
    assert child.wait(PATIENCE_SECONDS) == 0, (folder / f"{name}.log").read_text()


def kill_in(run: Path, step: int, start: Start, folder: Path) -> None:
    """SIGKILL after a checkpoint of `run`. Step `step` and later ones do not begin while the process is alive."""
    brake = folder / "brake"
    brake.write_text(json.dumps({"first": step, "last": 99, "step_seconds": PATIENCE_SECONDS}))
    child = start("killed")
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not (run / "checkpoints").is_dir() or not Reader(run / "checkpoints").steps():
            assert child.poll() is None, (folder / "killed.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        child.kill()
        child.wait()
        brake.unlink()
    assert not (run / "summary.json").exists()


def losses(run: Path, steps: int) -> list[str]:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["loss"].hex() for row in rows]


def test_the_same_command_continues_after_kills_in_both_stages(start: Start, folder: Path) -> None:
    """The last process has a supervisor, which starts a worker for each stage."""
    runs = folder / "runs"
    finish(start, folder, "whole")
    # The brake counts steps of any stage. Only the second stage has steps after FIRST.
    kill_in(runs / "killed-qat", 4, start, folder)
    assert not (runs / "killed-qat/model").exists()
    kill_in(runs / "killed-recovery", FIRST + 1, start, folder)
    result = runs / "killed-qat/model"
    stage_one = (runs / "killed-qat/metrics.jsonl").stat().st_mtime_ns
    before = {name: tensor.tobytes() for name, tensor in load_file(result / "model.safetensors").items()}
    # A kill while the result is written leaves no record of it, and perhaps half a folder.
    (result.parent / "model-result.json").unlink()
    (result / "model.safetensors").unlink()
    (runs / "killed-qat/.model.part").mkdir()
    finish(start, folder, "killed", "--supervise")
    assert {name: tensor.tobytes() for name, tensor in load_file(result / "model.safetensors").items()} == before
    assert (runs / "killed-qat/metrics.jsonl").stat().st_mtime_ns == stage_one, "the first stage was not run again"
    for stage, steps in (("qat", FIRST), ("recovery", SECOND)):
        assert losses(runs / f"killed-{stage}", steps) == losses(runs / f"whole-{stage}", steps)
        digests = [Reader(runs / f"{name}-{stage}/checkpoints").record(steps)["base"] for name in ("killed", "whole")]
        assert digests[0] == digests[1]
    assert json.loads((runs / "killed/stages.json").read_text()) == {
        "stages": {"qat": "killed-qat", "recovery": "killed-recovery"}
    }
