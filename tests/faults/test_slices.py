"""Tests of two slices as processes: equal to one slice, restored after a loss, and elastic.

`python tests/faults/slices_rig.py restore 5` and `elastic 5` repeat the faults; bench/slice_recovery.py records times.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from runs import Bench, Outcome, Run
from slices_rig import (
    EVERY,
    JOB,
    TOLERANCE,
    SlicesRun,
    elastic,
    one_slice,
    relative_difference,
    restored,
    slices_of,
    undisturbed,
)

from forerun.checkpoint.log import Log
from forerun.storage.folder import LocalFolder
from forerun.track.event_log import read_events

pytestmark = pytest.mark.timing

STEPS = 30


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("slices") / "bench", steps=STEPS, every=EVERY, job=JOB)


@pytest.fixture(scope="module")
def expected(bench: Bench) -> Outcome:
    return one_slice(bench)


@pytest.fixture(scope="module")
def two_slices(bench: Bench) -> Outcome:
    return undisturbed(bench)


def weights(run: Run) -> list[NDArray[np.generic]]:
    """The arrays of the newest checkpoint, on one device."""
    import jax
    from orbax.checkpoint import v1 as orbax

    where = f"{run.checkpoints.resolve()}/{Log(LocalFolder(run.checkpoints)).commits()[-1].folder}"
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), orbax.metadata(where).metadata
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(orbax.load(where, like))]


def require_equal(bench: Bench, job: SlicesRun, expected: Outcome) -> None:
    """The run equals that of one process on one slice: the data exactly, losses and weights within 1e-5."""
    outcome = job.run.outcome()
    assert outcome.ledger == expected.ledger
    assert relative_difference(outcome.losses, expected.losses) <= TOLERANCE
    for mine, theirs in zip(weights(job.run), weights(bench.run("one-slice")), strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_a_run_that_loses_a_slice_and_gets_it_back_equals_one_slice(bench: Bench, expected: Outcome) -> None:
    job, _ = elastic(bench, "elastic")
    require_equal(bench, job, expected)
    history = slices_of(job)
    assert [entry["slices"] for entry in history] == [2, 1, 2]
    assert history[1]["step"] % EVERY == 0, "it continued from a checkpoint of the schedule"
    starts = [event for event in read_events(job.run.folder / "events.jsonl") if event["event"] == "start"]
    assert [(event["slices"], event["devices"]) for event in starts] == [(2, 4), (1, 2), (2, 4)]
    stop = next(event for event in read_events(job.run.folder / "events.jsonl") if event["event"] == "stop")
    assert stop["reason"] == "slices"
    assert stop["step"] == history[2]["step"], "it returned at a step that was saved for it"
    assert [line["slices"] for line in job.log("fewer slices", "more slices")] == [1, 1]
    said = job.said_file(0).read_text()
    assert "1 of 2 slices" in said
    assert "slice 1 (host 1)" in said


@pytest.mark.slow
def test_two_slices_as_processes_equal_one_slice(bench: Bench, expected: Outcome, two_slices: Outcome) -> None:
    with SlicesRun(bench, "undisturbed") as job:  # finished by the fixture
        require_equal(bench, job, expected)
    summary = json.loads(Path(job.run.folder / "summary.json").read_text())
    assert summary["mesh"] == "2x(1x2x1)"
    assert summary["slices"] == [{"step": 0, "slices": 2}]


@pytest.mark.slow
def test_a_lost_slice_is_restored_to_the_bit(bench: Bench, two_slices: Outcome) -> None:
    job, _ = restored(bench, "restored")
    assert two_slices.differs_in(job.run.outcome()) == []


@pytest.mark.slow
def test_steps_before_the_loss_of_a_slice_are_the_same_to_the_bit(bench: Bench, two_slices: Outcome) -> None:
    job, _ = elastic(bench, "elastic-again")
    losses, last = job.run.losses(), slices_of(job)[1]["step"]
    assert [losses[step] for step in range(1, last + 1)] == [two_slices.losses[step] for step in range(1, last + 1)]
    assert relative_difference(losses, two_slices.losses) <= TOLERANCE
