"""The search over TPUs and GPUs against all candidates, with formulas in place of the compilers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config.schema import Job
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import GOALS, Goal, Outcome, Strategy
from forerun.resolve.resolved_job import ResolvedJob

ON = "v5e-4,v6e-1,h100-1,a100-80-2,4090-4"
JOB = {"model": "llama3.2-1b", "data": "/text", "batch": 16, "steps": 1000, "name": "j", "sequence": 2048}
SPACE = space_of(ResolvedJob(Job.model_validate(JOB)), ON, Bounds(lambda one: 1.0))
SLICES = sorted(SPACE.by_slice)
REMATS = sorted({str(one.remat) for one in SPACE.candidates})


@dataclass(frozen=True)
class World:
    """What compilers and markets would say. Step times and peaks are the estimates times these factors."""

    usd_per_hour: Mapping[str, float]
    slowness: Mapping[str, float]  # by slice
    remats: Mapping[str, float]  # by remat
    size: Mapping[str, float]  # of the peak, by platform

    def outcome(self, one: Candidate) -> Outcome:
        peak = int(SPACE.guessed_bytes(one) * self.size[one.slice.platform])
        seconds = SPACE.guessed_seconds(one) * self.slowness[one.slice.name] * self.remats[str(one.remat)]
        return Outcome(seconds if peak <= one.slice.chip.usable_bytes else None, peak)

    def strategy(self, goal: Goal) -> Strategy:
        return Strategy(SPACE, goal, {name: usd / 3600 for name, usd in self.usd_per_hour.items()})


def worlds(remat_error: float) -> st.SearchStrategy[World]:
    """Yield worlds in which the estimates are wrong by slice, and by remat up to a factor of `remat_error`."""
    return st.builds(
        World,
        usd_per_hour=st.fixed_dictionaries({name: st.floats(0.3, 30) for name in SLICES}),
        slowness=st.fixed_dictionaries({name: st.floats(1, 2.5) for name in SLICES}),
        remats=st.fixed_dictionaries({name: st.floats(1, remat_error) for name in REMATS}),
        size=st.fixed_dictionaries({"tpu": st.floats(0.9, 1.4), "gpu": st.floats(0.9, 1.4)}),
    )


def searched(world: World, goal: Goal) -> dict[Candidate, Outcome]:
    strategy, known = world.strategy(goal), {}
    while (one := strategy.next(known)) is not None:
        known[one] = world.outcome(one)
    return known


def best_score(world: World, goal: Goal, known: Mapping[Candidate, Outcome]) -> float:
    strategy = world.strategy(goal)
    return min(strategy.standing(one, o.seconds).score(goal) for one, o in known.items() if o.seconds is not None)


def exhaustive(world: World, space: Space = SPACE) -> dict[Candidate, Outcome]:
    return {one: world.outcome(one) for one in space.candidates}


@pytest.mark.parametrize("goal", GOALS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(world=worlds(1.0))
def test_prices_and_speeds_do_not_mislead_the_search(goal: Goal, world: World) -> None:
    """If estimates are right within each slice, the search finds exactly the best of all candidates."""
    known = searched(world, goal)
    assert best_score(world, goal, known) == best_score(world, goal, exhaustive(world))
    assert len(known) < len(SPACE.candidates) / 3


@pytest.mark.parametrize("goal", GOALS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(world=worlds(1.2))
def test_wrong_estimates_within_a_slice_cost_little(goal: Goal, world: World) -> None:
    power = 2 if goal == "balanced" else 1
    found, ideal = best_score(world, goal, searched(world, goal)), best_score(world, goal, exhaustive(world))
    assert found <= ideal * 1.05**power


def test_both_platforms_can_win() -> None:
    """With the price of the others out of reach, each slice is the cheapest once."""
    for name in SLICES:
        usd = {other: 0.1 if other == name else 1000.0 for other in SLICES}
        flat = dict.fromkeys(REMATS, 1.0)
        world = World(usd, dict.fromkeys(SLICES, 1.5), flat, {"tpu": 1.0, "gpu": 1.0})
        known = searched(world, "cheapest")
        strategy = world.strategy("cheapest")
        fitting = [one for one, outcome in known.items() if outcome.fits]
        best = min(fitting, key=lambda one: strategy.standing(one, known[one].seconds or 0.0).score("cheapest"))
        assert best.slice.name == name
