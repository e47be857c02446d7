"""The host's decisions by themselves; and with a real step on eight devices, against a plain loop without a guard."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error
from recording_reporter import RecordingReporter

from forerun.checkpoint.store import CheckpointStore
from forerun.config import schema
from forerun.config.schema import Job, Model, Optimizer, Precision, Remat
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.objectives.batch import Batch
from forerun.program import step as step_module
from forerun.program.build import Program, build, make_mesh
from forerun.program.guard import Verdict
from forerun.program.state import Metrics, State
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.compile_step import forbid_compilation
from forerun.run.guard import Action, DivergenceError, DivergenceGuard, SkipFile, SkippedSteps
from forerun.run.hooks import FinishedStep
from forerun.run.steps import StepPipeline

STEPS = 12
Spoil = Callable[[Batch[Any]], Batch[Any]]


def figures(verdict: Verdict = Verdict.TAKEN) -> Metrics:
    loss = float("nan") if verdict is Verdict.NOT_FINITE else 2.0
    return Metrics(loss, 50.0, 1e-3, 100.0, verdict)


BAD, SPIKE = figures(Verdict.NOT_FINITE), figures(Verdict.SPIKE)


def guard_with(*known: int, in_all: int = 10, in_a_row: int = 3) -> DivergenceGuard:
    return DivergenceGuard(SkippedSteps(dict.fromkeys(known, "before")), in_all=in_all, in_a_row=in_a_row)


def test_a_step_that_was_taken_is_the_end_of_it() -> None:
    guard = guard_with()
    assert [guard.decide(number, figures()) for number in (1, 2)] == [Action.CONTINUE] * 2
    assert guard.skips.known == {}


@pytest.mark.parametrize("bad", [BAD, SPIKE])
def test_once_more_and_then_without_the_batch(bad: Metrics) -> None:
    guard = guard_with()
    assert guard.decide(7, bad) is Action.REPLAY
    assert guard.decide(7, figures()) is Action.CONTINUE
    assert guard.decide(8, bad) is Action.REPLAY
    assert guard.decide(8, bad) is Action.SKIP
    assert (list(guard.skips.known), guard.trusts_state) == ([8], False)
    assert guard.decide(9, figures()) is Action.CONTINUE
    assert (list(guard.skips.known), guard.trusts_state) == ([8], True)


def skip(guard: DivergenceGuard, number: int, bad: Metrics = BAD) -> None:
    assert guard.decide(number, bad) is Action.REPLAY
    assert guard.decide(number, bad) is Action.SKIP


def test_a_second_spike_in_a_row_is_the_weights_and_is_taken() -> None:
    guard = guard_with()
    skip(guard, 7, SPIKE)
    assert [guard.decide(8, SPIKE), guard.decide(8, SPIKE)] == [Action.REPLAY, Action.ALLOW]
    assert guard.decide(8, figures()) is Action.CONTINUE
    assert (list(guard.skips.known), guard.trusts_state) == ([7], True)
    skip(guard, 9, BAD)
    skip(guard, 10, SPIKE)  # the one before was no spike
    skip(guard, 12, SPIKE)  # not the next one


def test_a_killed_process_knows_that_the_one_before_was_a_spike() -> None:
    guard = guard_with(5)
    guard.count_known_skip(5, "loss 2, gradient norm 50, a spike")
    assert [guard.decide(6, SPIKE), guard.decide(6, SPIKE)] == [Action.REPLAY, Action.ALLOW]


def test_every_step_bad_is_no_accident_of_the_data() -> None:
    guard = guard_with(2, in_all=100)
    for number in (5, 6, 7):
        skip(guard, number)
    guard.decide(8, BAD)
    with pytest.raises(
        DivergenceError, match=r"step 5: loss nan, gradient norm 50; and so on, every step up to 8"
    ) as stop:
        guard.decide(8, BAD)
    assert "optimizer.lr" in stop.value.fix
    assert "--fresh" in stop.value.fix
    assert list(guard.skips.known) == [2], "it was not these batches, so they are not left out for good"
    assert stop.value.exit_code not in (0, 2), "a supervisor starts again from the checkpoint"


def test_those_left_out_by_a_killed_process_count_in_the_row() -> None:
    guard = guard_with(5, 6, 7)
    for number in (5, 6, 7):
        guard.count_known_skip(number, "before")
    guard.decide(8, BAD)
    with pytest.raises(DivergenceError, match="every step up to 8"):
        guard.decide(8, BAD)
    assert guard.skips.known == {}


def test_so_many_and_no_more_in_all_also_after_a_restart() -> None:
    guard = guard_with(2, 4, in_all=3)
    skip(guard, 6)
    guard.decide(7, figures())
    guard.decide(8, SPIKE)
    with raises_error("E-RUN-031", "8", "2,", "50,", "3") as stop:
        guard.decide(8, SPIKE)
    assert "2, 4, 6 (" in stop.value.why
    assert "guard.skips" in stop.value.fix


def test_none_may_be_skipped_if_the_job_says_so() -> None:
    for guard in (guard_with(in_all=0), guard_with(in_a_row=0)):
        assert guard.decide(1, BAD) is Action.REPLAY
        with pytest.raises(UserError, match=r"1.*E-RUN-03[01]"):
            guard.decide(1, BAD)


def test_a_step_behind_a_refused_one_is_never_judged() -> None:
    with pytest.raises(RuntimeError, match="step 3 ran on a halted state"):
        guard_with().decide(3, figures(Verdict.HALTED))


# With a real step: two copies of a model split over four devices, two micro-batches.


@dataclass(frozen=True)
class Rig:
    program: Program
    guarded: Any
    plain: Any  # the same job's step, made without a rule
    batches: list[Batch[Any]]  # of steps 1, 2, ... at 0, 1, ...

    def start(self) -> State:
        return self.program.initial_state(3)

    def placed(self, batch: Batch[Any]) -> Batch[jax.Array]:
        return jax.tree.map(lambda like, x: jax.device_put(x, like.sharding), self.program.batch, batch)

    def expected(self, without: set[int], last: int = STEPS) -> State:
        """A plain loop over the batches that are good, in which nothing is refused."""
        return self.looped(self.guarded, without, last)

    def looped(self, step: Any, without: set[int], last: int = STEPS) -> State:
        state = self.start()
        for number in range(1, last + 1):
            if number not in without:
                state, metrics = step(state, self.placed(self.batches[number - 1]), self.program.placed_schedule())
                assert metrics.verdict is None or int(metrics.verdict) == Verdict.TAKEN
        return state


@pytest.fixture(scope="module")
def rig() -> Rig:
    job = Job(
        model=Model(layers=1, embed=32, heads=2, mlp=64, vocab=512),
        data="unread",
        sequence=8,
        batch=16,
        micro_batch=1,
        steps=STEPS,
        optimizer=Optimizer(lr=1e-2, ema=0.9),
        precision=Precision(compute="float32"),
        remat=Remat(policy="none"),
        guard=schema.Guard(window=4),
    )
    shape = MeshShape(2, 4, 1)
    mesh = make_mesh(shape, jax.devices()[:8])
    program = build(ResolvedJob(job), mesh, derive(job, shape, None))
    assert program.derived.accumulation == 2
    random_ids = np.random.default_rng(0)

    def batch() -> Batch[Any]:
        dims = program.batch.tokens.shape
        ids = random_ids.integers(0, 512, (*dims[:2], dims[2] + 1)).astype(np.int32)
        flat = np.broadcast_to(np.arange(dims[2], dtype=np.int32), dims)
        return Batch(ids[..., :-1], ids[..., 1:], np.ones(dims, np.float32), np.ones(dims, np.int32), flat)

    quickly = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "True"}
    guarded = program.trace().lower().compile(compiler_options=quickly)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "guarded", lambda rule, before, after, metrics: (after, metrics))
        plain_program = build(ResolvedJob(job), mesh, derive(job, shape, None))
        plain = plain_program.trace().lower().compile(compiler_options=quickly)
    return Rig(program, guarded, plain, [batch() for _ in range(STEPS)])


def not_a_number(batch: Batch[Any]) -> Batch[Any]:
    return replace(batch, weights=np.full_like(batch.weights, np.nan))


def huge(batch: Batch[Any]) -> Batch[Any]:
    """Weights that cancel out, so that nothing divides the gradient: finite, and hundreds of times too large."""
    weights = np.full_like(batch.weights, 300.0)
    weights[..., ::2] *= -1
    return replace(batch, weights=weights)


def run(
    rig: Rig,
    tied: dict[int, Spoil],
    passing: dict[int, Spoil] | None = None,
    *,
    state: State | None = None,
    first: int = 0,
    last: int = STEPS,
    guard: DivergenceGuard | None = None,
) -> tuple[State, list[FinishedStep]]:
    """As `run_steps` does: one step ahead of the figures. `passing` faults are gone when the step is run again."""
    passing = passing or {}
    guard = guard or guard_with()

    def batch_of(number: int) -> Batch[jax.Array]:
        batch = rig.batches[number - 1]
        return rig.placed(tied[number](batch) if number in tied else batch)

    schedule = rig.program.placed_schedule()
    pipeline = StepPipeline(
        rig.start() if state is None else state,
        guard,
        lambda state, batch: rig.guarded(state, batch, schedule),
        batch_of,
        jax.device_get,
    )
    finished: list[FinishedStep] = []
    for number in range(first + 1, last + 1):
        batch = rig.placed(passing[number](rig.batches[number - 1])) if number in passing else batch_of(number)
        pipeline.dispatch(number, batch)
        finished.extend(pipeline.collect(drain=number == last))
    return pipeline.state, finished


def same(state: State, expected: State) -> bool:
    """To the bit."""
    ours, theirs = jax.tree.leaves(state), jax.tree.leaves(expected)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(ours, theirs, strict=True))


def test_without_faults_the_guard_changes_nothing(rig: Rig) -> None:
    """Against a step made without a rule: another program, whose additions the compiler may order otherwise."""
    state, finished = run(rig, {})
    assert same(state, rig.expected(set()))
    plain = rig.looped(rig.plain, set())
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert [x.step for x in finished] == list(range(1, STEPS + 1))
    assert not any(x.warning or x.metrics_row() for x in finished)


def test_the_state_is_given_away_as_before(rig: Rig) -> None:
    guarded, plain = rig.guarded.memory_analysis(), rig.plain.memory_analysis()
    assert guarded.alias_size_in_bytes == plain.alias_size_in_bytes > 200_000


@pytest.mark.parametrize("spoil", [not_a_number, huge])
def test_a_passing_fault_leaves_no_trace(rig: Rig, spoil: Spoil) -> None:
    """The first step, one in the middle, the last."""
    expected = rig.expected(set())
    for number in (1, 7, STEPS) if spoil is not_a_number else (6, STEPS):
        state, finished = run(rig, {}, {number: spoil})
        assert same(state, expected)
        (one,) = [x for x in finished if x.rejection]
        assert (one.step, one.skip_reason, list(one.metrics_row())) == (number, None, ["replayed"])
        assert "the second try succeeded" in str(one.warning)


def test_a_bad_batch_is_as_if_it_had_never_been(rig: Rig) -> None:
    """Ten random places, one to three bad batches each, first and last ones and neighbours among them."""
    choose = random.Random(5)
    for _ in range(10):
        bad = set(choose.sample(range(1, STEPS + 1), choose.randint(1, 3)))
        state, finished = run(rig, dict.fromkeys(bad, not_a_number))
        assert same(state, rig.expected(bad)), bad
        assert {x.step for x in finished if x.skip_reason} == bad
        assert int(state.step) == STEPS - len(bad), "the schedule counts what was taken"


@pytest.mark.parametrize("bad", [{1}, {1, 2, 3}, {5, 6}, {STEPS - 1, STEPS}])
def test_bad_ones_at_the_edges_and_in_a_row(rig: Rig, bad: set[int]) -> None:
    state, finished = run(rig, dict.fromkeys(bad, not_a_number))
    assert same(state, rig.expected(bad))
    assert {x.step for x in finished if x.metrics_row().get("skipped") == "loss nan, gradient norm nan"} == bad


def test_a_spike_of_a_batch_is_left_out(rig: Rig) -> None:
    for number in (5, 9, STEPS):
        state, finished = run(rig, {number: huge})
        assert same(state, rig.expected({number}))
        (one,) = [x for x in finished if x.rejection]
        assert str(one.skip_reason).endswith("a spike")
        assert "nan" not in str(one.skip_reason)


def test_spikes_in_a_row_are_taken_from_the_second_on(rig: Rig) -> None:
    state, finished = run(rig, dict.fromkeys((6, 7, 8), huge))
    assert [(x.step, x.skip_reason is not None, x.allowed) for x in finished if x.rejection] == [
        (6, True, False),
        (7, False, True),
    ], "behind the second, norms are learned anew"
    assert "the batch is not the cause" in str(next(x for x in finished if x.allowed).warning)
    assert int(state.step) == STEPS - 1


def test_a_passing_fault_beside_a_bad_batch(rig: Rig) -> None:
    for passing in (4, 5, 6, 7):
        state, finished = run(rig, {5: not_a_number, 6: huge}, {passing: not_a_number})
        assert same(state, rig.expected({5, 6}))
        assert [x.step for x in finished if x.skip_reason] == [5, 6]


def test_lost_weights_stop_the_run_and_are_not_made_worse(rig: Rig) -> None:
    with pytest.raises(UserError, match=r"4.*E-RUN-03[01]"):
        run(rig, dict.fromkeys(range(4, STEPS + 1), not_a_number))


def test_nothing_is_compiled_for_any_of_it(rig: Rig) -> None:
    run(rig, {})
    with forbid_compilation() as check:
        run(rig, {4: not_a_number}, {8: not_a_number}, state=rig.start())
        check(STEPS)


def test_resumed_right_after_a_skip(rig: Rig, tmp_path: Path) -> None:
    bad = {6, 9}
    guard = DivergenceGuard(SkipFile(tmp_path / "skips.jsonl", identity="this run", saved={}), in_all=2, in_a_row=3)
    state, _ = run(rig, dict.fromkeys(bad, not_a_number), last=6, guard=guard)
    with closing(CheckpointStore(tmp_path / "checkpoints", keep=1)) as store:
        store.save(6, state, {})
        store.wait()
        state = store.restore(6, rig.program.state)
    again = DivergenceGuard(SkipFile(tmp_path / "skips.jsonl", identity="this run", saved={}), in_all=2, in_a_row=3)
    state, _ = run(rig, dict.fromkeys(bad, not_a_number), state=state, first=6, guard=again)
    whole, _ = run(rig, dict.fromkeys(bad, not_a_number))
    assert same(state, rig.expected(bad))
    assert np.array_equal(state.watch.norms, whole.watch.norms)
    assert list(again.skips.known) == [6, 9]


def test_what_a_killed_process_left_out_is_not_tried_again(rig: Rig) -> None:
    """Though its batch is healthy now: the decision stands, and the run is the one that was begun."""
    state, finished = run(rig, {}, guard=guard_with(1, 5, 6))
    assert same(state, rig.expected({1, 5, 6}))
    assert [(x.step, x.skip_reason) for x in finished if x.rejection] == [(1, "before"), (5, "before"), (6, "before")]


def opened(path: Path, **given: object) -> SkipFile:
    return SkipFile(path, **{"identity": "this run", "saved": {}, **given})  # type: ignore[arg-type]


def test_what_was_left_out_is_known_again(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    assert opened(file).known == {}
    assert not file.exists()
    opened(file).add(8, "loss nan, gradient norm nan")
    opened(file).add(12, "a spike")
    assert opened(file).known == {8: "loss nan, gradient norm nan", 12: "a spike"}


def test_a_line_torn_by_a_kill_is_not_there_and_not_in_the_way(tmp_path: Path) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    opened(file).add(8, "why")
    file.write_bytes(file.read_bytes() + b'{"step": 9, "wh')
    assert opened(file, reporter=RecordingReporter(told)).known == {8: "why"}
    opened(file).add(10, "why not")
    assert opened(file).known == {8: "why", 10: "why not"}
    assert told == []


def test_what_was_not_the_batchs_fault_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    skips = opened(file)
    for step in (3, 8, 9):
        skips.add(step, "why")
    skips.forget([8, 9, 10])
    assert skips.known == opened(file).known == {3: "why"}
    assert list(tmp_path.iterdir()) == [file]


def test_steps_up_to_the_checkpoint_come_from_it_and_later_ones_from_the_file(tmp_path: Path) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    skips = opened(file)
    for step in (2, 3, 8):
        skips.add(step, "why")
    again = opened(file, step=5, saved={3: "why", 4: "why"}, reporter=RecordingReporter(told))
    assert again.known == {3: "why", 4: "why", 8: "why"}
    [text] = told
    assert "4 are restored" in text
    assert "2 are removed" in text
    assert opened(file, step=5, saved={3: "why", 4: "why"}, reporter=RecordingReporter(told)).known == again.known
    assert len(told) == 1


FORGED = [
    {"step": 9, "why": "x"},
    {"step": 9, "why": "x", "proof": ""},
    {"step": 9, "why": "x", "proof": 7},
    {"step": 9, "why": 3},
    {"step": "many", "why": "x"},
    {},
]


@pytest.mark.parametrize("forged", FORGED, ids=json.dumps)
def test_a_line_that_this_run_did_not_write_is_removed(tmp_path: Path, forged: dict[str, object]) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    opened(file).add(8, "why")
    before = file.read_bytes()
    file.write_bytes(before + json.dumps(forged).encode() + b"\n")
    assert opened(file, reporter=RecordingReporter(told)).known == {8: "why"}
    assert file.read_bytes() == before
    assert len(told) == 1


def test_a_changed_line_and_one_of_another_run_are_removed(tmp_path: Path) -> None:
    file, other, told = tmp_path / "skips.jsonl", tmp_path / "other.jsonl", list[str]()
    opened(file).add(8, "why")
    opened(other, identity="another run").add(9, "why")
    file.write_bytes(file.read_bytes().replace(b"8", b"7", 1) + other.read_bytes())
    assert opened(file, reporter=RecordingReporter(told)).known == {}
    [text] = told
    assert "7, 9" in text
