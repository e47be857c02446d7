"""One flipped bit in one device's copy, on eight devices; the oracle is which device we gave it to."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job, Model, Optimizer
from forerun.hardware.mesh import MeshShape
from forerun.program.build import Program, build, make_mesh
from forerun.program.state import State
from forerun.reporter import LineReporter
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run import train as loop
from forerun.run.compile_step import forbid_compilation
from forerun.run.replicas import CorruptionError, ReplicaCheck, replica_check_of, replicated_arrays
from forerun.run.steps import StepPipeline
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]


def program_on(shape: MeshShape, embed: int = 16) -> Program:
    job = Job(
        model=Model(layers=1, embed=embed, heads=2, mlp=32, vocab=64),
        data="unread",
        sequence=8,
        batch=8,
        steps=10,
        optimizer=Optimizer(ema=0.9),
    )
    mesh = make_mesh(shape, jax.devices()[:8])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


def damaged(array: jax.Array, places: tuple[int, ...], bit: int = 0) -> jax.Array:
    """With one bit of the copies at these places flipped, and all other copies as they were."""
    parts = []
    for place, shard in enumerate(array.addressable_shards):
        raw = np.array(shard.data)
        if place in places:
            raw.view(f"u{raw.dtype.itemsize}").reshape(-1)[raw.size // 2] ^= raw.dtype.type(0).view(
                f"u{raw.dtype.itemsize}"
            ) | (1 << bit)
        parts.append(jax.device_put(raw, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_damage(state: State, place: tuple[int, ...], bit: int = 0) -> State:
    return replace(state, params=replace(state.params, embed=damaged(state.params.embed, place, bit)))


def prove(check: ReplicaCheck, step: int, state: State) -> None:
    """Compare a state that is about to be saved, as the checkpoint hook does."""
    check.record(step, state)
    check.require_equal(step)


@pytest.fixture(scope="module")
def eight() -> tuple[Program, ReplicaCheck]:
    program = program_on(MeshShape(8, 1, 1))
    return program, ReplicaCheck(program, 4)


def test_equal_copies_are_equal_and_nothing_is_compiled_for_it(eight: tuple[Program, ReplicaCheck]) -> None:
    program, check = eight
    assert check.compared_share == 1
    state = program.initial_state(0)
    with forbid_compilation() as require_no_compilation:
        for number in range(1, 9):
            check.on_dispatch(number, state)
            check.require_equal(number)
        prove(check, 9, state)
        require_no_compilation(9)


@pytest.mark.parametrize(("place", "bit"), [(0, 0), (3, 31), (7, 12)])
def test_the_device_with_a_flipped_bit_is_named(eight: tuple[Program, ReplicaCheck], place: int, bit: int) -> None:
    program, check = eight
    bad = with_damage(program.initial_state(0), (place,), bit)
    check.on_dispatch(3, bad)  # not its turn
    check.require_equal(3)
    check.on_dispatch(4, bad)
    check.require_equal(3)  # of step 4 later
    with pytest.raises(CorruptionError) as stop:
        check.require_equal(4)
    name = f"host 0 device {program.mesh.devices.flat[place].id}"
    assert_error(stop.value, "E-RUN-015", what="step 4: ")
    assert stop.value.what.endswith(f" {name}")
    assert stop.value.why.startswith("state.params.embed: 8 devices hold it")
    assert "7 do, this" in stop.value.why
    assert stop.value.exit_code not in (0, 2), "a supervisor starts again"
    with pytest.raises(CorruptionError, match="step 5"):
        prove(check, 5, bad)


def test_parts_are_compared_with_copies_of_the_same_part_and_two_have_no_majority() -> None:
    """data 2, fsdp 4: each quarter is held twice."""
    program = program_on(MeshShape(2, 4, 1), embed=1024)
    check = ReplicaCheck(program, 1)
    state = program.initial_state(0)
    assert not state.params.embed.sharding.is_fully_replicated
    prove(check, 1, state)
    with pytest.raises(CorruptionError, match=re.escape("one of host 0 device")) as stop:
        prove(check, 2, with_damage(state, (1,)))
    embed = next(
        one for one in replicated_arrays(program.state, list(program.mesh.devices.flat)) if one.name.endswith("embed")
    )
    (pair,) = [group for group in embed.groups if 1 in group]
    assert len(pair) == 2
    assert all(f"device {program.mesh.devices.flat[place].id}" in stop.value.what for place in pair)


def test_what_has_no_copy_is_told_in_one_line() -> None:
    program = program_on(MeshShape(1, 8, 1), embed=1024)
    told = io.StringIO()
    job = Job.model_validate({"model": {"layers": 1}, "data": "unread", "guard": {"compare_every": 5}})
    check = replica_check_of(ResolvedJob(job), program, LineReporter(told, clock=time.monotonic))
    assert 0 < check.compared_share < 0.1
    assert re.search(r"compares [0-9.]+% of the state.*mesh 1x8x1", told.getvalue())
    assert told.getvalue().count("\n") == 1
    quiet, off = io.StringIO(), Job.model_validate({"model": {"layers": 1}, "data": "unread"})
    prove(replica_check_of(ResolvedJob(off), program, LineReporter(quiet, clock=time.monotonic)), 1, program.state)
    assert quiet.getvalue() == ""


def test_a_run_stops_before_it_saves_what_is_damaged_and_goes_on_from_what_is_whole(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged in step 6, found at the save of step 8 though nothing was compared in between."""
    keys = ("steps=9", "checkpoint.every=4", "devices=4", "mesh.data=4", "mesh.fsdp=1", "guard.compare_every=100")
    job = make_job(*keys)
    dispatch = StepPipeline.dispatch

    def with_a_flip(self: StepPipeline, step: int, batch: Any) -> None:
        dispatch(self, step, batch)
        if step == 6:
            self.state = with_damage(self.state, (2,), 3)

    def display() -> LineReporter:
        return LineReporter(io.StringIO(), clock=time.monotonic)

    with monkeypatch.context() as patch:
        patch.setattr(StepPipeline, "dispatch", with_a_flip)
        with pytest.raises(CorruptionError, match="step 8: silent corruption on host 0 device"):
            loop.train(job, display())
    folder = Path(job.runs) / "tiny"
    with CheckpointStore(folder / "checkpoints", keep=2) as store:
        assert store.newest() == 4
    loop.train(job, display())
    undisturbed = make_job(*keys, "name=undisturbed")
    loop.train(undisturbed, display())
    found, wanted = (
        [row["loss"] for row in read_metrics(Path(job.runs) / name / "metrics.jsonl")]
        for name in ("tiny", "undisturbed")
    )
    assert found == wanted
