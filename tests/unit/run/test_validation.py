"""Validation while training, against a plain computation document by document."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sized
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from forerun.checkpoint.reader import Reader
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.run_devices import program_on
from forerun.run.train import train
from forerun.run.validation import Best, ValidationResult, require_nats
from forerun.supervise.protocol.channel import NullChannel
from forerun.supervise.worker import ProgressReporter, Worker
from forerun.supervise.worker_stop import Stop
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
KEPT = ("data.validation=0.3", "data.packing=whole", "sequence=80", "validation.every=2")


@pytest.fixture
def documents(tmp_path: Path, job_file: Path) -> MakeJob:
    """The tiny job on forty short documents, a third of them kept back."""
    (tmp_path / "rows").mkdir()
    lines = [f'{{"text": "number {n}: {"tick " * (n % 7 + 1)}and {n * n} tocks"}}' for n in range(40)]
    (tmp_path / "rows" / "clock.jsonl").write_text("\n".join(lines))
    given = [f"runs={tmp_path / 'runs'}", f"data.path={tmp_path / 'rows'}", f"data.store={tmp_path / 'store'}"]
    return lambda *overrides: load(job_file, [*given, *KEPT, *overrides]).job


def looks(job: Job) -> dict[int, float]:
    rows = read_metrics(Path(job.runs) / job.name / "metrics.jsonl")
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def run(job: Job) -> str:
    out = io.StringIO()
    with make_display(out) as display:
        assert train(job, display) is not None
    return out.getvalue()


@pytest.mark.parametrize(
    "devices",
    [("devices=1",), ("devices=8",), ("devices=8", "mesh.fsdp=4", "mesh.context=2")],
    ids=["one device", "eight devices", "split sequences"],
)
def test_the_loss_is_that_of_the_documents_one_by_one(documents: MakeJob, devices: tuple[str, ...]) -> None:
    job = documents(*devices)
    said = run(job)
    found = looks(job)
    assert list(found) == [2, 4, 6]
    assert f"validation at step 6: loss {found[6]:.4f}, perplexity {math.exp(found[6]):.4g}" in said

    corpus = open_corpus(resolve_model(job))
    kept = corpus.parts[0].store.validation
    assert kept is not None
    program = program_on(resolve_model(documents("devices=1")).with_data(corpus), choose("cpu", 1), None)
    state = Reader(Path(job.runs) / job.name / "checkpoints").restore(6, program.state)
    nats = count = 0.0
    begins = kept.begins(np.arange(len(kept) + 1))
    for start, stop in pairwise(begins.tolist()):
        tokens = np.asarray(kept.read(start, stop)[0], np.int32)
        inputs = jnp.asarray(tokens[None, :-1])
        ones, places = jnp.ones_like(inputs), jnp.arange(len(tokens) - 1)[None]
        out = program.model.apply(state.params, inputs, ones, places, program.compute)
        logits = np.asarray(out.logits(), np.float64)[0]
        right = logits[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(logits).sum(-1))
        nats, count = nats - right.sum(), count + len(right)
    assert found[6] == pytest.approx(nats / count, rel=1e-5)


def test_fewer_batches_look_at_fewer_rows_and_every_look_at_the_same(documents: MakeJob) -> None:
    job = documents("validation.batches=1", "optimizer.lr=1e-12", "batch=4")
    run(job)
    found = list(looks(job).values())
    assert max(found) - min(found) < 1e-6, "the weights did not move, so the loss does not"
    whole = documents("optimizer.lr=1e-12", "batch=4", "name=whole")
    run(whole)
    assert abs(found[0] - looks(whole)[2]) > 1e-6, "other rows, another loss"


def test_patience_ends_the_run_and_a_restart_does_not_go_on(documents: MakeJob) -> None:
    job = documents(
        "optimizer.lr=10", "optimizer.warmup=0", "optimizer.schedule=constant", "steps=200", "validation.patience=2"
    )
    said = run(job)
    found = looks(job)
    best = min(found, key=lambda step: found[step])
    assert list(found)[-1] == best + 4 < 200, found
    assert f"no lower validation loss in 2 evaluations; the best was {found[best]:.4f} at step {best}" in said
    assert Reader(Path(job.runs) / job.name / "checkpoints").newest() == best + 4
    run(job)
    assert looks(job) == found


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss(documents: MakeJob) -> None:
    """At a rate far too high, tried until the best is not the last: which one that is depends on jax's version."""
    for rate in (10, 3, 30, 1, 100):
        job = documents(
            f"name=rate-{rate}",
            f"optimizer.lr={rate}",
            "optimizer.warmup=0",
            "optimizer.schedule=constant",
            "steps=12",
            "checkpoint.keep=1",
            "checkpoint.keep_best=1",
        )
        run(job)
        found = looks(job)
        best = min(found, key=lambda step: found[step])
        if best < 12:
            break
    assert best < 12, "else this proves nothing"
    assert Reader(Path(job.runs) / job.name / "checkpoints").steps() == [best, 12]


def test_a_resumed_run_looks_alike(documents: MakeJob) -> None:
    straight, stopped = documents("name=straight"), documents("name=stopped")
    run(straight)
    run(stopped)
    folder = Path(stopped.runs) / "stopped" / "checkpoints"
    newest = max((folder / "commits").glob("*.json"))
    newest.unlink()  # as if it had been killed before its last commit
    run(stopped)
    assert looks(stopped) == looks(straight)


class StopAt(Stop):
    """Announced before unit `last` + 1 begins, with time for a save."""

    def __init__(self, last: int) -> None:
        super().__init__(NullChannel(), leave=lambda: None)
        self._stop_after = last

    def go(self) -> bool:
        if self.units == self._stop_after:
            self.here(30.0)
        return super().go()


@pytest.mark.parametrize("at", [4, 6])
def test_a_stop_inside_a_look_does_not_lose_it(documents: MakeJob, at: int) -> None:
    """Six steps with a look of three batches after every second: after step 4 the ninth unit is a look's second."""
    words = ("batch=4", "checkpoint.keep=1", "checkpoint.keep_best=1", "optimizer.lr=10", "optimizer.warmup=0")
    straight, stopped = documents("name=straight", *words), documents("name=stopped", *words)
    run(straight)
    rows = len(concrete_rows(stopped))
    batches = -(-rows // 4)
    assert batches >= 2, "else a look is one unit, and nothing falls inside of it"
    stop = StopAt(at + (at // 2 - 1) * batches + 1)
    worker = Worker(attempt=0, index=0, hosts=1, coordinator="", pulse=ProgressReporter(NullChannel(), stop), stop=stop)
    out = io.StringIO()
    with make_display(out) as display:
        assert train(stopped, display, worker=worker) is None
    assert f"stopped as asked after step {at}" in out.getvalue()
    assert at not in looks(stopped)
    run(stopped)
    assert looks(stopped) == looks(straight)
    for job in (stopped, straight):
        reader = Reader(Path(job.runs) / job.name / "checkpoints")
        assert {step: reader.record(step)["loss"] for step in reader.steps()} == {
            step: looks(straight)[step] for step in reader.steps()
        }
    kept = [Reader(Path(job.runs) / job.name / "checkpoints").steps() for job in (stopped, straight)]
    assert kept[0] == kept[1]


def concrete_rows(job: Job) -> Sized:
    kept = open_corpus(resolve_model(job)).kept
    assert kept is not None
    return kept


def test_best_counts_looks() -> None:
    best = Best().after(2, 3.0).after(4, 3.5).after(6, 3.0)
    assert (best.loss, best.step, best.looks_since) == (3.0, 2, 2)
    assert best.after(8, 2.9) == Best(2.9, 8, 0)


def test_a_perplexity_is_that_of_the_text_or_is_not_told() -> None:
    mixed = ValidationResult(2, 3.0, Best(3.0, 2), {"hard": 1.5}, nats=1.5)
    assert mixed.metrics_row == {
        "validation_loss": 3.0,
        "validation_perplexity": pytest.approx(math.exp(1.5)),
        "validation_hard": 1.5,
    }
    assert "3.0000, perplexity 4.482" in str(mixed)
    other = ValidationResult(4, 0.69, Best(0.5, 2, 1))
    assert other.metrics_row == {"validation_loss": 0.69}
    assert "perplexity" not in str(other)
    assert str(other).endswith("best 0.5000 at step 2")


def test_nats_that_an_objective_does_not_tell() -> None:
    require_nats(None, ["loss"])
    require_nats("hard", ["loss", "hard"])
    with pytest.raises(UserError, match="the objective's nats is 'whole', and it returns no such sum"):
        require_nats("whole", ["loss", "half"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("data.validation=0", "validation.patience=2"), "no documents are held out"),
        (("validation.every=4", "checkpoint.every=6", "checkpoint.keep_best=1"), "must be a multiple"),
    ],
)
def test_what_cannot_be_judged_is_refused(documents: MakeJob, overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError) as refused:
        documents(*overrides)
    assert why in refused.value.what
