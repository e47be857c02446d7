"""Give a real run batches that are no numbers or far too large, once or for good, and see that it comes out as it must.

    python tests/faults/guard_rig.py 30             # about three minutes; one JSON line per trial, then a summary

Each trial is a function of its number. EXACT is: the loss of every step to the bit, the hash of the final state, and
the ledger are those of a plain loop over the batches that are good, which runs nothing again and leaves nothing out. Of
a fault that comes once these are all of them; of one that is tied to a batch, all but that. Some runs are killed with
SIGKILL after the fault, and resumed with the data mended or not: what was left out stays out.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # programs here run for milliseconds and compile for seconds
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import entries
from forerun.hardware.devices import choose
from forerun.reporter import LineReporter, StepView
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run import train as loop
from forerun.run.open_data import Placement
from forerun.track.metrics import read_metrics

STEPS, EVERY, WINDOW = 24, 5, 8
KINDS = ("nan once", "nan tied killed", "spike tied", "spike once", "nan tied", "spike tied killed")
JOB = f"""\
model: {{layers: 1, embed: 16, heads: 2}}
data: {{path: text, ledger: true}}
sequence: 16
batch: 8
steps: {STEPS}
device: cpu
devices: 1
optimizer: {{lr: 1e-2, ema: 0.9}}
precision: {{compute: float32}}
remat: none
guard: {{window: {WINDOW}}}
checkpoint: {{every: {EVERY}}}
sample: {{tokens: 0}}
"""


@dataclass(frozen=True)
class Trial:
    number: int
    kind: str
    steps: tuple[int, ...]  # whose batches are bad
    kill_at: int | None = None  # after this step's figures
    mended: bool = False  # the data is good when the run is resumed


def trial_of(number: int) -> Trial:
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    first = WINDOW + 1 if "spike" in kind else 1  # until the window is full nothing is a spike
    many = 1 if "once" in kind else chance.randint(1, 3)
    steps = tuple(sorted(chance.sample(range(first, STEPS + 1), many)))
    taken = [step for step in range(steps[0] + 1, STEPS) if step not in steps]
    if "killed" not in kind or not taken:
        return Trial(number, kind, steps)
    return Trial(number, kind, steps, chance.choice(taken), chance.random() < 0.5)


class Faulty:
    """The batches of a run, some of them spoiled: each time they are asked for, or the first time only."""

    def __init__(self, batches: Batches, trial: Trial) -> None:
        self._batches, self._trial = batches, trial
        self._bad = set(trial.steps)
        self.examples_at = batches.examples_at

    def batch_at(self, index: int) -> Any:
        batch = self._batches.batch_at(index)
        if index + 1 not in self._bad:
            return batch
        if "once" in self._trial.kind:
            self._bad.remove(index + 1)
        if "nan" in self._trial.kind:
            return replace(batch, weights=np.full_like(batch.weights, np.nan))
        weights = np.full_like(batch.weights, 5.0)  # they cancel out, so that nothing divides the gradient
        weights[..., ::2] *= -1
        return replace(batch, weights=weights)


class Quiet(LineReporter):
    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__(io.StringIO(), clock=time.monotonic)
        self._kill_at = kill_at

    def step(self, view: StepView) -> None:
        if view.step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def made(folder: Path) -> Job:
    if not (folder / "job.yaml").exists():
        (folder / "text").mkdir(parents=True)
        words = random.Random(7)
        said = " ".join("".join(words.choices("abcdefgh", k=words.randint(2, 7))) for _ in range(1500))
        (folder / "text" / "words.txt").write_text(said)
        (folder / "job.yaml").write_text(JOB)
    return load(folder / "job.yaml", [f"runs={folder / 'runs'}", f"data.store={folder / 'store'}"]).job


def run(job: Job, trial: Trial | None, kill_at: int | None = None) -> Any:
    """The real loop, from the newest checkpoint if there is one."""
    healthy = loop.batches_of
    if trial is not None:
        loop.batches_of = lambda *given: Faulty(healthy(*given), trial)  # type: ignore[assignment,return-value]
    try:
        return loop.train(job, Quiet(kill_at))
    finally:
        loop.batches_of = healthy


def digest(state: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


class Oracle:
    """The same job's step in a plain loop over batches that are good, in which nothing is ever refused."""

    def __init__(self, job: Job) -> None:
        resolved = resolve_model(job)
        corpus = open_corpus(resolved)
        resolved = resolved.with_data(corpus)
        self._program = loop.program_on(resolved, choose("cpu", 1), corpus.rows.epoch)
        self._step = self._program.trace().lower().compile()
        self._schedule = self._program.placed_schedule()
        self._seed, self._batches = job.seed, loop.batches_of(resolved, self._program, corpus)
        self._placed = Placement(self._program.batch)

    @cache  # noqa: B019
    def without(self, bad: frozenset[int]) -> tuple[dict[int, float], str, list[Any]]:
        """(loss by step, hash of the final state, ledger)."""
        state, losses = self._program.initial_state(self._seed), {}
        for step in sorted(set(range(1, STEPS + 1)) - bad):
            state, metrics = self._step(state, self._placed(self._batches.batch_at(step - 1)), self._schedule)
            assert int(metrics.verdict) == 0, step
            losses[step] = float(metrics.loss)
        learned = [(s, [] if s in bad else self._batches.examples_at(s - 1)) for s in range(1, STEPS + 1)]
        return losses, digest(state), learned


def tried(trial: Trial, folder: Path, oracle: Oracle) -> dict[str, Any]:
    job = made(folder)
    began = time.monotonic()
    if trial.kill_at is not None:
        command = [sys.executable, __file__, "killed", str(folder), str(trial.number)]
        code = subprocess.run(command, check=False, capture_output=True).returncode
        assert code == -signal.SIGKILL, code
    finished = run(job, None if trial.mended else trial)
    assert finished is not None
    folder = folder / "runs" / job.name
    rows = read_metrics(folder / "metrics.jsonl")
    left_out = {row["step"]: row["skipped"] for row in rows if "skipped" in row}
    bad = frozenset() if "once" in trial.kind else frozenset(trial.steps)
    if trial.mended:  # those after the kill were never seen to be bad
        bad = frozenset(step for step in bad if step < trial.kill_at)  # type: ignore[operator]
    losses, state, ledger = oracle.without(bad)
    exact = {
        "losses": {row["step"]: row["loss"] for row in rows if "skipped" not in row} == losses,
        "state": digest(finished.state) == state,
        "ledger": list(entries(folder / "ledger.jsonl")) == ledger,
    }
    marked = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    told = left_out.keys() == bad == {line["step"] for line in marked if "skipped" in line}
    replayed = [row["step"] for row in rows if "replayed" in row]
    return {
        **asdict(trial),
        **exact,
        "left_out": left_out,
        "replayed": replayed,
        "exact": all(exact.values()) and told and ("once" not in trial.kind or replayed == list(trial.steps)),
        "seconds": round(time.monotonic() - began, 2),
    }


def trials(count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        oracle = Oracle(made(Path(name, "oracle")))
        for number in range(count):
            yield tried(trial_of(number), Path(name, str(number)), oracle)


def main() -> int:
    if sys.argv[1] == "killed":
        trial = trial_of(int(sys.argv[3]))
        run(made(Path(sys.argv[2])), trial, trial.kill_at)
        return 0
    results = []
    for result in trials(int(sys.argv[1])):
        results.append(result)
        print(json.dumps(result), flush=True)
    exact = [result for result in results if result["exact"]]
    print(json.dumps({"trials": len(results), "exact": len(exact), "kinds": Counter(r["kind"] for r in exact)}))
    return 0 if len(exact) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
