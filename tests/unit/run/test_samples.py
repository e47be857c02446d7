"""Samples during training: which steps have them, whose weights they come from, and what a resumed run has."""

from __future__ import annotations

import io
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forerun.checkpoint.store import CheckpointStore
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.nn.spec import merge
from forerun.reporter import LineReporter, StepView
from forerun.resolve.resolve_model import resolve_model
from forerun.run.run_devices import program_on
from forerun.run.sample import sample_text
from forerun.run.train import train
from forerun.track.event_log import read_events
from forerun.track.metrics import read_metrics

PROMPTS = ("It was ", "the worst of times, it was")  # the second one is longer than the sequence of 16 bytes
JOB = (
    "steps=7",
    "checkpoint.every=3",
    "optimizer.lr=1e-1",
    "optimizer.ema=0.99",
    "sample.every=2",
    "sample.tokens=20",
    "sample.temperature=1",
    f"sample.prompts=[{', '.join(repr(prompt) for prompt in PROMPTS)}]",
)


class Killed(BaseException):
    """Ends a run like a kill: nothing is saved."""


class Fragile(LineReporter):
    """Ends the run when a step is shown."""

    def __init__(self, last: int | None = None) -> None:
        self.out, self._last = io.StringIO(), last
        super().__init__(self.out, clock=time.monotonic)

    def step(self, view: StepView) -> None:
        if view.step == self._last:
            raise Killed
        super().step(view)


def samples(job: Job) -> list[tuple[int, Any]]:
    rows = read_metrics(Path(job.runs) / job.name / "metrics.jsonl")
    return [(row["step"], row["samples"]) for row in rows if "samples" in row]


@pytest.fixture(scope="module")
def job(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return load(job_file, [f"runs={tmp_path_factory.mktemp('runs')}", *JOB]).job


@pytest.fixture(scope="module")
def shown(job: Job) -> str:
    display = Fragile()
    assert train(job, display) is not None
    return display.out.getvalue()


def test_samples_are_written_every_n_steps_and_at_the_last_step(job: Job, shown: str) -> None:
    found = samples(job)
    assert [step for step, _ in found] == [2, 4, 6, 7]
    for step, texts in found:
        assert [text["prompt"] for text in texts] == list(PROMPTS)
        assert f"sample at step {step}: " in shown
    seconds = [event for event in read_events(Path(job.runs) / job.name / "events.jsonl") if event["event"] == "time"]
    assert seconds[-1]["seconds"]["samples"] > 0


def test_samples_come_from_the_averaged_weights(job: Job, shown: str) -> None:
    resolved = resolve_model(job)
    program, tokenizer = program_on(resolved, choose("cpu", 1), None), ByteTokenizer()
    with closing(CheckpointStore(Path(job.runs) / job.name / "checkpoints", keep=2)) as store:
        state = store.restore(7, program.saved(program.state))
    assert state.average is not None
    first = job.sample.model_copy(update={"prompt": PROMPTS[0]})
    averaged, newest = (
        sample_text(program, weights, tokenizer, first, job.sequence, job.seed)
        for weights in (merge(state.average, state.params), state.params)
    )
    assert averaged != newest, "otherwise the test proves nothing"
    assert PROMPTS[0] + samples(job)[-1][1][0]["text"] == averaged


def test_a_killed_and_resumed_run_has_each_sample_once(job: Job, shown: str, tmp_path: Path) -> None:
    again = job.model_copy(update={"runs": str(tmp_path)})
    with pytest.raises(Killed):
        train(again, Fragile(last=5))
    assert [step for step, _ in samples(again)] == [2, 4]
    finished = train(again, Fragile())
    assert finished is not None
    assert finished.summary["resumed_at"] == 3, "the samples of step 4 are generated again"
    assert samples(again) == samples(job)
    events = read_events(tmp_path / job.name / "events.jsonl")
    assert [event["reason"] for event in events if event["event"] == "stop"] == ["Killed"]


@pytest.mark.parametrize(
    ("code", "override"),
    [
        ("E-JOB-137", ["sample.every=5", "sample.tokens=0"]),
        ("E-JOB-138", [f"sample.prompts=[{', '.join(f'p{n}' for n in range(65))}]"]),
        ("E-JOB-139", ["sample.prompts=[a, b, a]"]),
    ],
)
def test_values_that_cannot_be_used(code: str, override: list[str], job_file: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(job_file, override)
    assert raised.value.code == code


def test_the_prompt_of_the_end_is_the_default(job_file: Path) -> None:
    assert load(job_file, ["sample.prompt=Alice"]).job.sample.texts == ("Alice",)
    assert load(job_file, ["sample.prompts=Alice"]).job.sample.texts == ("Alice",)
