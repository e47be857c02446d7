"""Lost slices, in real runs: `python tests/faults/slices_rig.py FAULT TRIALS`, one JSON line per trial.

Each of two slices is one host: `forerun train job.yaml --host I/2 ...` with two virtual devices on this machine. FAULT:

    restore   SIGKILL to all processes of slice 1, which starts again immediately: the run restarts with two slices
    elastic   SIGKILL to all processes of slice 1: the run continues with one slice, and returns to two

The seconds are those from the kill, or from the new start of the host, to the next new step, without the time that the
leader waits for a lost slice. At the end, the losses, the final state and the ledger of `restore` are those of an
undisturbed run on two slices, bit for bit. The losses of `elastic` are within 1e-5 of them, and bit-identical up to the
loss of the slice.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["JAX_PLATFORMS"] = "cpu"

from runs import WAITS, Bench, Outcome
from runs_hosts import HostsRun

SLICES, DEVICES, STEPS, EVERY = 2, 2, 60, 5
FIRST, STEP_SECONDS = 12, 0.5  # a slice is lost at this step, and steps are slower from shortly before it
TOLERANCE = 1e-5
JOB = """\
model: {{layers: 1, embed: 32, heads: 2}}
data: {{path: text, ledger: true}}
sequence: 32
batch: 8
micro_batch: 2
steps: {steps}
device: cpu
optimizer: {{lr: 3e-4}}
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
sample: {{tokens: 0}}
mesh: {{slices: 2}}
"""
ELASTIC = ("mesh.min_slices=1", "mesh.slice_wait_seconds=0")
FLAGS = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {WAITS}"}


class SlicesRun(HostsRun):
    """One run on two slices of one host each."""

    def __init__(self, bench: Bench, name: str, *words: str) -> None:
        super().__init__(bench, name, SLICES, *words, environment=FLAGS)

    def lose(self, host: int) -> float:
        """Kill all processes of a host. Return when. A checkpoint exists, and the worker dies with its supervisor."""
        assert self.run.newest() > 0
        since = time.time()
        lost = self.supervisors.pop(host)
        lost.kill()
        lost.wait()
        return since

    def starts(self) -> list[int]:
        """The slices of every attempt."""
        return [line["slices"] for line in self.log("start")]

    def new_step(self, slices: int, since: float) -> float:
        """Return the seconds from a moment to the first new step of the next attempt on this number of slices."""

        def started() -> bool:
            starts = [line for line in self.log("start") if line["unix_seconds"] > since]
            return any(line["slices"] == slices for line in starts)

        self.until(started, f"attempt on {slices} slices")
        return self.until_step(self.run.last_step() + 1) - since


def one_slice(bench: Bench) -> Outcome:
    """The run of one process on one slice."""
    with bench.run("one-slice") as run:
        run.start("mesh.slices=1", devices=DEVICES)
        run.finish()
        return run.outcome()


def undisturbed(bench: Bench, *words: str) -> Outcome:
    with SlicesRun(bench, "undisturbed", *words) as job:
        assert job.start_all().wait() == [0] * SLICES, job.said()
        return job.run.outcome()


def restored(bench: Bench, name: str) -> tuple[SlicesRun, dict[str, float]]:
    """Return the finished run that lost a slice, and the seconds until it made steps again."""
    with bench.held_back(FIRST - 2, STEPS, step_seconds=STEP_SECONDS), SlicesRun(bench, name) as job:
        job.start_all().until_step(FIRST)
        since = job.lose(1)
        job.start(1)
        seconds = {"restart_seconds": round(job.new_step(SLICES, since), 2)}
        bench.release()
        assert job.wait() == [0] * SLICES, job.said()
        assert set(job.starts()) == {2}
        return job, seconds


def elastic(bench: Bench, name: str) -> tuple[SlicesRun, dict[str, float]]:
    """Return the finished run that lost a slice and got it back, and the seconds until it made steps again."""
    with bench.held_back(FIRST - 2, STEPS, step_seconds=STEP_SECONDS), SlicesRun(bench, name, *ELASTIC) as job:
        job.start_all().until_step(FIRST)
        seconds = {"degrade_seconds": round(job.new_step(1, job.lose(1)), 2)}
        since = time.time()
        job.start(1)
        seconds["return_seconds"] = round(job.new_step(SLICES, since), 2)
        bench.release()
        assert job.wait() == [0] * SLICES, job.said()
        # A host of a busy machine may be lost for a moment, so there may be more attempts.
        assert [slices for slices, _ in groupby(job.starts())][:3] == [2, 1, 2], job.starts()
        return job, seconds


def relative_difference(mine: Mapping[int, str], theirs: Mapping[int, str]) -> float:
    """Return the largest relative difference of the losses of two runs with the same steps."""
    assert list(mine) == list(theirs)
    pairs = [(float.fromhex(mine[step]), float.fromhex(theirs[step])) for step in mine]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def slices_of(job: SlicesRun) -> list[dict[str, int]]:
    """Return what the summary says about the slices."""
    found: list[dict[str, int]] = json.loads((job.run.folder / "summary.json").read_text())["slices"]
    return found


def trial(bench: Bench, fault: str, number: int, expected: Outcome) -> dict[str, Any]:
    job, seconds = (restored if fault == "restore" else elastic)(bench, f"{fault}-{number}")
    outcome = job.run.outcome()
    worst = relative_difference(outcome.losses, expected.losses)
    about = {"fault": f"slices {fault}", "trial": number, **seconds, "loss_relative_difference": worst}
    if fault == "restore":
        return {**about, "ok": not expected.differs_in(outcome)}
    before = slices_of(job)[1]["step"]
    same = all(outcome.losses[step] == expected.losses[step] for step in range(1, before + 1))
    return {**about, "ok": same and worst <= TOLERANCE and outcome.ledger == expected.ledger}


def main(fault: str, trials: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), steps=STEPS, every=EVERY, job=JOB)
        expected = undisturbed(bench)
        for number in range(trials):
            print(json.dumps(trial(bench, fault, number, expected)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
