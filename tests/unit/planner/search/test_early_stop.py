"""The early stop of a search: its bounds and predictions on recorded results, and the reasons that it reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config.schema import Job
from forerun.planner.search.outcome import SearchEnding, ending_of
from forerun.planner.search.regression import Estimate, StepModel
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import ERRORS, LOOK_AHEAD, TRIES, Outcome, Rejection, Strategy
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

RESULTS = Path(__file__).resolve().parents[4] / "bench" / "results"
Answers = dict[str, dict[str, Any]]
Compiler = Callable[[Candidate], Outcome]


def space_for(on: str, **values: Any) -> Space:
    given = {"model": "llama3.2-1b", "data": "text", "batch": 8, "sequence": 2048, "steps": 1000, "name": "j", **values}
    return space_of(ResolvedJob(Job.model_validate(given)), on, Bounds(lambda one: 2.0 * one.chips))


def recorded() -> Iterator[tuple[str, Space, Answers]]:
    """Spaces of which every candidate was compiled."""
    for name, task in json.loads((RESULTS / "search_quality.json").read_text())["tasks"].items():
        yield name, space_for(task["on"], **task["job"]), task["answers"]
    mixed = json.loads((RESULTS / "search_gpu.json").read_text())
    yield "gpu", space_for(mixed["on"], **mixed["job"]), mixed["answers"]


RECORDED = {name: (space, answers) for name, space, answers in recorded()}
# Compiles of the search that compiled all neighbours of the best plan (2026-11-15).
COMPILES_OF_ALL_NEIGHBOURS = {"small-on-four-chips": 11, "llama3.1-8b": 8, "qwen3-0.6b": 36, "gpu": 18}


def strategy_of(space: Space, goal: str = "fastest") -> Strategy:
    rates = {name: 2.0 * group[0].slice.chips / 3600 for name, group in space.by_slice.items()}
    return Strategy(space, goal, rates)  # type: ignore[arg-type]


def run(strategy: Strategy, tell: Compiler) -> dict[Candidate, Outcome]:
    known: dict[Candidate, Outcome] = {}
    while (one := strategy.next(known)) is not None:
        known[one] = tell(one)
    return known


def told_by(answers: Answers) -> Compiler:
    return lambda one: Outcome(answers[str(one)].get("step_seconds"), answers[str(one)].get("peak_bytes"))


def shortest(outcomes: dict[Candidate, Outcome]) -> float:
    return min(outcome.seconds for outcome in outcomes.values() if outcome.seconds)


@pytest.mark.parametrize("name", RECORDED)
def test_no_recorded_step_is_below_its_bound(name: str) -> None:
    space, answers = RECORDED[name]
    steps = {one: answers[str(one)].get("step_seconds") for one in space.candidates}
    bounds = {one: space.sizes.lower_bound_step_seconds(one.slice.chip, one.mesh) for one in steps}
    assert all(0 < bounds[one] <= seconds for one, seconds in steps.items() if seconds)
    assert sum(seconds is not None for seconds in steps.values()) > 20


@pytest.mark.parametrize("name", RECORDED)
def test_no_recorded_candidate_fits_although_a_smaller_one_does_not(name: str) -> None:
    space, answers = RECORDED[name]
    strategy, tell = strategy_of(space), told_by(answers)
    everything = {one: tell(one) for one in space.candidates}
    for one, outcome in everything.items():
        others = {other: result for other, result in everything.items() if other != one}
        assert not (outcome.fits and strategy._cannot_fit(others, one)), one


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("goal", ["cheapest", "fastest"])
def test_the_best_of_recorded_spaces_is_found_with_fewer_compiles(name: str, goal: str) -> None:
    space, answers = RECORDED[name]
    strategy, tell = strategy_of(space, goal), told_by(answers)
    known = run(strategy, tell)

    def score(one: Candidate, seconds: float) -> float:
        return strategy.standing(one, seconds).score(strategy.goal)

    every = {one: tell(one).seconds for one in space.candidates}
    best = min(score(one, seconds) for one, seconds in every.items() if seconds)
    assert min(score(one, o.seconds) for one, o in known.items() if o.seconds) <= 1.01 * best
    assert len(known) < COMPILES_OF_ALL_NEIGHBOURS[name]
    assert ending_of(strategy, known, interrupted=False).cause == "prediction"


@pytest.mark.parametrize("name", RECORDED)
def test_few_recorded_steps_are_shorter_than_predicted(name: str) -> None:
    """With 1.5 standard deviations, a normal distribution has 6.7 % of its values below the low end."""
    space, answers = RECORDED[name]
    below = []
    for group in space.by_slice.values():
        fitting = {one: seconds for one in group if (seconds := answers[str(one)].get("step_seconds"))}
        for first in range(5):  # every fifth candidate is known
            known = {one: seconds for n, (one, seconds) in enumerate(fitting.items()) if n % 5 == first}
            rest = [one for one in fitting if one not in known]
            found = StepModel(space, known, {}).seconds(rest)
            below += [fitting[one] < estimate.low(ERRORS) for one, estimate in zip(rest, found, strict=True)]
    assert sum(below) / len(below) < 0.12


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_search_stops_exactly_when_every_candidate_left_has_a_reason(random: Any) -> None:
    space = space_for("v5e-4", batch=4)
    strategy = strategy_of(space)
    factors = {one: random.uniform(0.8, 1.3) for one in space.candidates}
    known: dict[Candidate, Outcome] = {}
    while (one := strategy.next(known)) is not None:
        reasons = strategy.rejected(known)
        assert strategy.best(known, "v5e-4") is None or one not in reasons or one in space.as_written.values()
        fits = random.random() < 0.8
        known[one] = Outcome(space.guessed_seconds(one) * factors[one] if fits else None, 1 if fits else 99 * GIB)
    left = set(space.candidates) - set(known)
    reasons = strategy.rejected(known)
    assert left == set(reasons)
    assert ending_of(strategy, known, interrupted=False).rejections == Counter(reasons.values())


def test_a_plan_at_its_bound_ends_the_search_by_proof() -> None:
    space = space_for("v6e-4")
    strategy = strategy_of(space)
    bound = min(space.sizes.lower_bound_step_seconds(one.slice.chip, one.mesh) for one in space.candidates)
    known = run(strategy, lambda one: Outcome(bound, GIB))
    ending = ending_of(strategy, known, interrupted=False)
    assert len(known) <= 2  # the first, and the job as written
    assert ending.cause == "bound"
    assert set(ending.rejections) == {Rejection.TIME_PROOF}
    assert ending.nearest is None


def test_equal_candidates_end_the_search_and_the_first_one_wins() -> None:
    space = space_for("v6e-4")
    strategy = strategy_of(space)
    known = run(strategy, lambda one: Outcome(3.0, GIB))
    assert {outcome.seconds for outcome in known.values()} == {3.0}
    assert ending_of(strategy, known, interrupted=False).cause in ("prediction", "all compiled")
    best = strategy.best(known, "v6e-4")
    assert best == min(known, key=space.candidates.index)


def test_nothing_fits() -> None:
    space = space_for("v6e-4")
    strategy = strategy_of(space)
    known = run(strategy, lambda one: Outcome(None, 99 * GIB))
    ending = ending_of(strategy, known, interrupted=False)
    assert 0 < len(known) <= TRIES
    assert strategy.best(known, "v6e-4") is None
    assert set(ending.rejections) <= {Rejection.MEMORY_PROOF, Rejection.GIVEN_UP}
    assert ending.nearest is None
    assert ending.text()


def test_everything_fits_and_the_formula_is_right() -> None:
    space = space_for("v6e-4")
    strategy = strategy_of(space)
    known = run(strategy, lambda one: Outcome(2 * space.guessed_seconds(one), GIB))
    assert shortest(known) == 2 * min(space.guessed_seconds(one) for one in space.candidates)
    assert len(known) < len(space.candidates) / 4
    ending = ending_of(strategy, known, interrupted=False)
    assert ending.cause == "prediction"
    assert ending.nearest is not None
    truth = min(space.guessed_seconds(one) for one in space.candidates if one not in known)
    assert ending.nearest.mid == pytest.approx(2 * truth / shortest(known), rel=0.1)


def test_all_candidates_are_compiled_on_request() -> None:
    space = space_for("v6e-4", batch=4)
    strategy = replace(strategy_of(space), compile_all=True)
    known = run(strategy, lambda one: Outcome(space.guessed_seconds(one), GIB))
    assert set(known) == set(space.candidates)
    assert ending_of(strategy, known, interrupted=False).cause == "all compiled"


def test_the_expected_number_of_compiles_is_exact_at_the_end_and_limited_before() -> None:
    space, answers = RECORDED["llama3.1-8b"]
    strategy, tell = strategy_of(space), told_by(answers)
    order = list(run(strategy, tell))
    known = {one: tell(one) for one in order[:-1]}
    assert strategy.expected_compiles(known) == 1
    assert strategy.expected_compiles(known | {order[-1]: tell(order[-1])}) == 0
    assert 1 < strategy.expected_compiles({}) <= LOOK_AHEAD
    assert replace(strategy, compile_all=True).expected_compiles(known) == len(space.candidates) - len(known)


def test_a_stopped_search_counts_what_may_be_better() -> None:
    space = space_for("v6e-4")
    strategy = strategy_of(space)
    first = strategy.next({})
    assert first is not None
    known = {first: Outcome(space.guessed_seconds(first), GIB)}
    limited, pressed = (ending_of(strategy, known, interrupted=flag) for flag in (False, True))
    assert (limited.cause, pressed.cause) == ("limit", "interrupted")
    assert limited.open_count == pressed.open_count > 0
    assert limited.open_count + limited.rejections.total() == len(space.candidates) - 1


def test_a_custom_model_keeps_its_policies_apart() -> None:
    """Its activations are unknown: full remat and no remat must not get the same prediction with no error."""
    space = space_for("v6e-1", batch=2)
    unknown = replace(space, sizes=replace(space.sizes, widths={}, forward_layers_flops=0.0, attention_flops=0.0))
    known, other = (
        next(one for one in space.candidates if one.remat.policy == policy and one.micro_batch == 1)
        for policy in ("full", "none")
    )
    [found] = StepModel(unknown, {known: 1.0}, {}).seconds([other])
    assert found.deviation > 0.1


def test_the_reason_names_the_margin_and_its_error() -> None:
    rejections = Counter({Rejection.TIME_PREDICTION: 40, Rejection.MEMORY_PREDICTION: 2})
    ending = SearchEnding("prediction", rejections, nearest=Estimate(math.log(1.062), 0.021))
    assert all(part in ending.text() for part in ("42", "6 %", "2 %"))
    found = ending.to_dict()
    assert (found["by"], found["nearest_slower_by"], found["nearest_error"]) == ("prediction", 0.062, 0.021)
    assert sum(found["not_compiled"].values()) == 42
    assert "1 %" in replace(ending, nearest=Estimate(0.0, 0.01)).text()
