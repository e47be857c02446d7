"""A run that was killed and resumed is the run that was never killed, to the last bit.

Kills at other moments are in tests/faults, whose results hold 200 of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from runs import PATIENCE_SECONDS, Bench, Outcome, Run, children

from forerun.exit_codes import STOPPED

pytestmark = pytest.mark.timing

STEPS, EVERY, DEVICES = 60, 5, 8
JOB = """\
model: {{layers: 2, embed: 32, heads: 4}}
data: {{path: text, ledger: true}}
sequence: 64
batch: 32
steps: {steps}
device: cpu
optimizer: {{lr: 1e-2, ema: 0.9}}
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
sample: {{tokens: 0}}
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume") / "bench", steps=STEPS, every=EVERY, job=JOB)


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench) -> Outcome:
    return bench.reference(devices=DEVICES)


def resumed_at(run: Run) -> int:
    return int(json.loads((run.folder / "summary.json").read_text())["resumed_at"])


def kill_after_a_checkpoint(run: Run) -> None:
    """Kill the run after step 7. Step 10 waits until the kill, so that the run cannot end before."""
    with run.bench.held_back(10, STEPS, step_seconds=PATIENCE_SECONDS):
        run.start(devices=DEVICES)
        assert run.wait_for(lambda: run.last_step() >= 7 and run.newest()), run.said()
        run.kill(run.worker())
    assert run.process.returncode == -signal.SIGKILL
    assert not (run.folder / "summary.json").exists()


def test_killed_and_resumed_is_equal_to_the_last_bit(bench: Bench, uninterrupted: Outcome) -> None:
    """Losses, all arrays of the final state, and the examples of each step."""
    with bench.run("killed") as run:
        kill_after_a_checkpoint(run)
        shutil.copytree(run.folder, run.folder.with_name("moved"))
        run.start(devices=DEVICES)
        run.finish()
        assert EVERY <= resumed_at(run) < STEPS
        assert run.outcome().differs_in(uninterrupted) == []


def test_resumed_on_half_the_devices(bench: Bench, uninterrupted: Outcome) -> None:
    """Another order of additions, so equal to rounding, and not to the bit."""
    with bench.run("moved") as run:
        if not run.folder.exists():
            kill_after_a_checkpoint(run)
        run.start("devices=4", devices=DEVICES)
        run.finish()
        assert "mesh 1x4x1" in run.said()
        ours, theirs = ([*map(float.fromhex, of.values())] for of in (run.losses(), uninterrupted.losses))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=0)


def test_asked_to_stop_it_saves_and_goes_on_to_the_last_bit(bench: Bench, uninterrupted: Outcome) -> None:
    with bench.run("asked") as run:
        with bench.held_back(13, STEPS, step_seconds=2.0):
            run.start("checkpoint.every=1000", devices=DEVICES)
            assert run.wait_for(lambda: run.last_step() >= 12), run.said()
            run.kill(run.worker(), signal.SIGTERM)
            run.finish(STOPPED)
        stopped = run.last_step()
        assert 12 <= stopped < STEPS
        assert [commit.step for commit in run.commits()] == [stopped]
        run.start("checkpoint.every=1000", devices=DEVICES)
        run.finish()
        assert resumed_at(run) == stopped
        assert run.losses() == uninterrupted.losses


def test_asked_to_stop_before_the_first_step_it_leaves_at_once(bench: Bench) -> None:
    with bench.run("early") as run, bench.held_back(1, STEPS, begin_seconds=PATIENCE_SECONDS):
        run.start(devices=DEVICES)
        assert run.wait_for(lambda: "program:" in run.said()), run.said()
        began = time.monotonic()
        run.kill(run.worker(), signal.SIGTERM)
        run.finish(STOPPED)
        assert time.monotonic() - began < PATIENCE_SECONDS / 4  # it does not wait until it may begin
        assert run.newest() == 0


def test_supervised_a_killed_run_starts_again_by_itself(bench: Bench, uninterrupted: Outcome) -> None:
    with bench.run("supervised") as run:
        with bench.held_back(13, STEPS, step_seconds=2.0):
            run.start(devices=DEVICES, supervise=True)
            supervisor = run.process.pid
            assert run.wait_for(lambda: run.last_step() >= 12 and run.newest()), run.said()
            assert run.wait_for(lambda: len(children(supervisor)) == 2), run.said()
            worker, spare = children(supervisor)
            os.kill(worker, signal.SIGKILL)
            assert run.wait_for(lambda: worker not in children(supervisor)), run.said()
        run.finish()
        assert not Path(f"/proc/{spare}").exists()  # it ends with its supervisor
        assert resumed_at(run) >= EVERY
        assert run.losses() == uninterrupted.losses
