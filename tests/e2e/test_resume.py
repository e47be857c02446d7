"""A run that was killed and resumed is the run that was never killed, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore
from forerun.config.load import load
from forerun.exit_codes import STOPPED
from forerun.hardware.devices import choose
from forerun.program.state import State
from forerun.resolve.resolve_model import resolve_model
from forerun.run.run_devices import program_on
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.timing

STEPS = 60
DEVICES = 8
PATIENCE_SECONDS = 600
ROOT = Path(__file__).resolve().parents[2]
JOB = f"""\
model: {{layers: 2, embed: 32, heads: 4}}
data: text
sequence: 64
batch: 32
steps: {STEPS}
device: cpu
optimizer: {{lr: 1e-2, ema: 0.9}}
precision: {{compute: float32}}
checkpoint: {{every: 5}}
sample: {{tokens: 0}}
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    text = ROOT / "examples" / "quickstart" / "text" / "carroll-alice.txt"
    (folder / "text").mkdir()
    shutil.copy(text, folder / "text")
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def start(shell: dict[str, str], job_file: Path) -> Start:
    """`forerun train` as a process of its own, on eight virtual devices, with the brake of tests/faults/brake."""
    environment = {
        **shell,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests/faults/brake"), shell.get("PYTHONPATH")])),
        "FORERUN_TEST_BRAKE": str(job_file.with_name("brake")),
    }

    def begin(name: str, *overrides: str) -> subprocess.Popen[bytes]:
        words = ["forerun", "train", str(job_file), f"name={name}", *overrides]
        with (job_file.parent / f"{name}.log").open("ab") as log:
            return subprocess.Popen(words, cwd=job_file.parent, env=environment, stdout=log, stderr=log)

    return begin


@contextmanager
def held_back(job_file: Path, after: int, step_seconds: float = 2.0, **seconds: float) -> Iterator[None]:
    """Runs past this step, so that they are found where they shall be killed or stopped, though we may look late."""
    file = job_file.with_name("brake")
    file.write_text(json.dumps({"first": after + 1, "last": STEPS, "step_seconds": step_seconds, **seconds}))
    try:
        yield
    finally:
        file.unlink()


def finish(child: subprocess.Popen[bytes], folder: Path) -> Path:
    assert child.wait(PATIENCE_SECONDS) == 0, folder.parent.with_name(f"{folder.name}.log").read_text()
    return folder


def wait_for(come: Callable[[], bool], child: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not come():
        told = folder.parent.with_name(f"{folder.name}.log").read_text()
        assert child.poll() is None, told
        assert time.monotonic() < deadline, told
        time.sleep(0.005)


def last_step(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(metrics)), default=0) if metrics.exists() else 0


def kill_after(step: int, start: Start, job_file: Path, folder: Path) -> None:
    """SIGKILL once the metrics tell of this step and a checkpoint is whole. Steps are told when a later one has begun;
    two steps on the run stands until it is killed, so that it cannot come to its end before."""
    with held_back(job_file, step + 2, step_seconds=PATIENCE_SECONDS):
        child = start(folder.name)
        try:
            wait_for(lambda: last_step(folder) >= step and bool(saved(folder)), child, folder)
        finally:
            child.kill()
            child.wait()
    assert child.returncode == -9
    assert not (folder / "summary.json").exists()
    assert last_step(folder) < STEPS


def saved(folder: Path) -> list[int]:
    return Reader(folder / "checkpoints").steps()


def losses(folder: Path) -> dict[int, str]:
    """Each step's loss, all its bits."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return {row["step"]: row["loss"].hex() for row in rows}


def final_state(folder: Path, job_file: Path) -> State:
    job = resolve_model(load(job_file).job)
    program = program_on(job, choose("cpu", DEVICES), None)
    with closing(CheckpointStore(folder / "checkpoints", keep=2)) as store:
        assert store.newest() == STEPS
        return store.restore(STEPS, program.state)


@pytest.fixture(scope="module")
def uninterrupted(start: Start, job_file: Path) -> Path:
    return finish(start("uninterrupted"), job_file.parent / "runs" / "uninterrupted")


def test_killed_and_resumed_is_equal_to_the_last_bit(start: Start, job_file: Path, uninterrupted: Path) -> None:
    """Kills at other moments are in tests/faults; its results hold 200 of them."""
    folder = job_file.parent / "runs" / "killed"
    kill_after(7, start, job_file, folder)
    shutil.copytree(folder, folder.with_name("moved"))
    finish(start(folder.name), folder)
    resumed_at = json.loads((folder / "summary.json").read_text())["resumed_at"]
    assert 5 <= resumed_at < STEPS
    assert losses(folder) == losses(uninterrupted)
    resumed, whole = (jax.tree.leaves(final_state(run, job_file)) for run in (folder, uninterrupted))
    assert len(resumed) == len(whole) > 20
    for mine, theirs in zip(resumed, whole, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_resumed_on_half_the_devices(start: Start, job_file: Path, uninterrupted: Path) -> None:
    """Another order of additions, so equal to rounding, and not to the bit."""
    folder = job_file.parent / "runs" / "moved"
    if not folder.exists():
        kill_after(7, start, job_file, folder)
    finish(start(folder.name, "devices=4"), folder)
    assert "mesh 1x4x1" in folder.parent.with_name("moved.log").read_text()
    mine, theirs = (np.array([float.fromhex(loss) for loss in losses(run).values()]) for run in (folder, uninterrupted))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=0)


def test_asked_to_stop_it_saves_and_goes_on_to_the_last_bit(start: Start, job_file: Path, uninterrupted: Path) -> None:
    folder = job_file.parent / "runs" / "asked"
    with held_back(job_file, 12):
        child = start(folder.name, "checkpoint.every=1000")
        wait_for(lambda: last_step(folder) >= 12, child, folder)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_SECONDS) == STOPPED
    stopped = last_step(folder)
    assert 12 <= stopped < STEPS
    assert saved(folder) == [stopped]
    assert f"stopped as asked after step {stopped}" in folder.parent.with_name("asked.log").read_text()
    finish(start(folder.name, "checkpoint.every=1000"), folder)
    assert json.loads((folder / "summary.json").read_text())["resumed_at"] == stopped
    assert losses(folder) == losses(uninterrupted)


def test_asked_to_stop_before_the_first_step_it_leaves_at_once(start: Start, job_file: Path) -> None:
    folder = job_file.parent / "runs" / "early"
    log = folder.parent.with_name("early.log")
    with held_back(job_file, 0, begin_seconds=PATIENCE_SECONDS):
        child = start(folder.name)
        wait_for(lambda: "program:" in log.read_text(), child, folder)
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_SECONDS) == STOPPED
        assert time.monotonic() - began < PATIENCE_SECONDS / 4, "it has not waited until it could begin"
    assert saved(folder) == []


def test_supervised_a_killed_run_starts_again_by_itself(start: Start, job_file: Path, uninterrupted: Path) -> None:
    folder = job_file.parent / "runs" / "supervised"
    with held_back(job_file, 12):
        supervisor = start(folder.name, "--supervise")
        wait_for(lambda: last_step(folder) >= 12 and bool(saved(folder)), supervisor, folder)
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        wait_for(lambda: len(children.read_text().split()) == 2, supervisor, folder)
        worker, spare = children.read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        wait_for(lambda: worker not in children.read_text().split(), supervisor, folder)
    finish(supervisor, folder)
    assert not Path(f"/proc/{spare}").exists(), "it ends with its supervisor"
    assert json.loads((folder / "summary.json").read_text())["resumed_at"] >= 5
    assert losses(folder) == losses(uninterrupted)
