"""The choice of the next candidate to compile, and the decision to stop.

On one slice, cost is proportional to time. So the search looks for the shortest step of each slice:

1. Compile the best guess, then smaller programs until one fits.
2. Predict the other candidates of the slice from the compiled ones, each with an error. Compile the one with the
   largest expected gain. Stop if none is left that may win.

A candidate cannot win if it cannot fit, or if a found plan beats its lower bound in time and cost: both are proofs. A
candidate is not expected to win if its predicted memory is too large, or if the best plan beats its predicted time even
with a margin for the error: both are predictions. Candidates that are expected to reach the Pareto front of time and
cost are compiled, too. The choice depends only on the results so far, so an interrupted
search resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from forerun.config.schema import Remat
from forerun.planner.search.lower_bound import kept_names
from forerun.planner.search.regression import Estimate, StepModel
from forerun.planner.search.space import Candidate, Space

Goal = Literal["cheapest", "fastest", "balanced"]
GOALS: tuple[Goal, ...] = ("cheapest", "fastest", "balanced")
FIRST_ROOM = 0.95  # share of HBM that a first guess may fill by the estimate
TRIES = 5  # guesses on a slice on which nothing fits
ERRORS = 1.5  # standard deviations: a candidate may be this much better than its prediction
LOOK_AHEAD = 20  # compiles
LEAST_GAIN = 0.01  # a shorter step by this share is not worth a compile


@dataclass(frozen=True)
class Outcome:
    """The result of a compile, as far as the strategy needs it."""

    seconds: float | None  # of a step; None if the candidate does not fit or could not be compiled
    peak_bytes: int | None  # None if it could not be compiled

    @property
    def fits(self) -> bool:
        return self.seconds is not None


Known = Mapping[Candidate, Outcome]


@dataclass(frozen=True)
class TimeAndCost:
    """A point of time and cost, of a step or of a complete job. `usd` is None if no price is known."""

    seconds: float
    usd: float | None

    def beats(self, other: TimeAndCost) -> bool:
        """Return whether this point is at least as good as `other` in both time and cost, and better in one.

        A point without a price is beaten by any faster point. It beats only slower points without a price.
        """
        if self.usd is None or other.usd is None:
            return other.usd is None and self.seconds < other.seconds
        return (
            self.seconds <= other.seconds
            and self.usd <= other.usd
            and (self.seconds < other.seconds or self.usd < other.usd)
        )

    def equals_or_beats(self, other: TimeAndCost) -> bool:
        """Return whether `other` cannot win against this point, nor reach the Pareto front beside it."""
        return self == other or self.beats(other)

    def score(self, goal: Goal) -> float:
        """Return the value that the goal minimises.

        Balanced minimises time x cost: saving a tenth of the time is worth as much as saving a tenth of the cost.
        """
        if goal == "fastest":
            return self.seconds
        if self.usd is None:
            return float("inf")
        return self.usd if goal == "cheapest" else self.usd * self.seconds


class Rejection(Enum):
    """Why a candidate is not compiled."""

    MEMORY_PROOF = "cannot fit: a smaller program did not fit"
    TIME_PROOF = "cannot win: its lower bound is above the best plan"
    MEMORY_PREDICTION = "predicted to be too large"
    TIME_PREDICTION = "predicted to be slower than the best plan"
    GIVEN_UP = "on a slice where nothing fitted"

    @property
    def is_proof(self) -> bool:
        return self in (Rejection.MEMORY_PROOF, Rejection.TIME_PROOF)


@dataclass(frozen=True)
class Outlook:
    """The prospects of a candidate that is not compiled."""

    seconds: Estimate
    gain: float  # expected, as a share of the slice's best step
    rejection: Rejection | None  # None: it may win


@dataclass(frozen=True)
class Strategy:
    """A search strategy for one space and goal. It has no state: the results so far are passed as `known`."""

    space: Space
    goal: Goal
    usd_per_second: Mapping[str, float | None]  # price of the complete slice, by its name
    # Billed seconds of a run beside its steps, such as its start, per step and by the name of the slice. A short run on
    # a slower machine may be cheaper because of them.
    overhead_seconds: Mapping[str, float] = field(default_factory=dict)
    compile_all: bool = False  # whether candidates that are not expected to win are compiled, too

    def standing(self, one: Candidate, seconds: float) -> TimeAndCost:
        """Return the time and cost of a step of `seconds` on the candidate's slice, with its share of the overhead."""
        rate = self.usd_per_second[one.slice.name]
        billed = seconds + self.overhead_seconds.get(one.slice.name, 0.0)
        return TimeAndCost(billed, None if rate is None else rate * billed)

    def best(self, known: Known, name: str) -> Candidate | None:
        """Return the candidate with the shortest known step on a slice, or None if none is known to fit."""
        fitting = [(known[one].seconds, n, one) for n, one in enumerate(self.space.by_slice[name]) if one in known]
        found = [(seconds, n, one) for seconds, n, one in fitting if seconds is not None]
        return min(found)[2] if found else None

    def next(self, known: Known, running: Collection[Candidate] = ()) -> Candidate | None:
        """Return the most promising candidate that is neither known nor running.

        None means that there is nothing to compile now. Results of running compiles may change that.
        """
        for one in self.proposals(known):
            if one not in known and one not in running:
                return one
        return None

    def proposals(self, known: Known) -> Iterator[Candidate]:
        """Yield candidates, most promising first; some may be known already.

        First come guesses on slices without a result that fits, then candidates that may win or reach the Pareto front
        of time and cost, on the slice of the best plan first. With `compile_all`, all others follow.
        """
        best = {name: self.best(known, name) for name in self.space.by_slice}
        points = [self._found(known, one) for one in best.values() if one]
        for name in sorted((name for name, one in best.items() if one is None), key=self._promise):
            if not self._hopeless(name, points):
                yield from self._guesses(known, name)
        found = sorted((one for one in best.values() if one), key=lambda one: self._found(known, one).score(self.goal))
        for n, one in enumerate(found):
            yield from self._promising(known, one, points)
            if n == 0 and one.slice.name in self.space.as_written:
                yield self.space.as_written[one.slice.name]
        if self.compile_all:
            yield from self.space.candidates

    def expected_compiles(self, known: Known) -> int:
        """Return the number of candidates that the search will still compile if all results are as predicted.

        The prediction looks at most LOOK_AHEAD compiles ahead, unless all candidates are compiled.
        """
        if self.compile_all:
            return len(self.space.candidates) - len(known)
        imagined = dict(known)
        while len(imagined) - len(known) < LOOK_AHEAD and (one := self.next(imagined)) is not None:
            model = self._model(imagined, one.slice.name)
            [seconds], [peak] = model.seconds([one]), model.peak_bytes([one])
            fits = peak.mid <= (one.slice.chip.usable_bytes or 0)
            imagined[one] = Outcome(seconds.mid if fits else None, int(peak.mid))
        return len(imagined) - len(known)

    def rejected(self, known: Known) -> dict[Candidate, Rejection]:
        """Return the reasons against all candidates that are not compiled. Candidates worth a compile are omitted."""
        best = {name: self.best(known, name) for name in self.space.by_slice}
        points = [self._found(known, one) for one in best.values() if one]
        reasons: dict[Candidate, Rejection] = {}
        for name, one in best.items():
            if one is not None:
                found = {other: outlook.rejection for other, outlook in self._outlooks(known, one, points).items()}
                reasons |= {other: reason for other, reason in found.items() if reason}
                continue
            hopeless = self._hopeless(name, points)
            for other in self.space.by_slice[name]:
                if other not in known:
                    larger = Rejection.MEMORY_PROOF if self._cannot_fit(known, other) else Rejection.GIVEN_UP
                    reasons[other] = Rejection.TIME_PROOF if hopeless else larger
        return reasons

    def nearest(self, known: Known) -> Estimate | None:
        """Return the best prediction among the candidates that are rejected by it, on the slice of the best plan.

        It is relative to the step of that plan: a middle of 1.06 means 6 % slower. None means that no candidate of the
        slice is rejected by its time.
        """
        fitting = filter(None, (self.best(known, name) for name in self.space.by_slice))
        best = min(fitting, key=lambda one: self._found(known, one).score(self.goal), default=None)
        if best is None:
            return None
        own = math.log(self._seconds(known, best))
        found = [
            Estimate(outlook.seconds.log_mean - own, outlook.seconds.deviation)
            for outlook in self._outlooks(known, best, [self._found(known, best)]).values()
            if outlook.rejection is Rejection.TIME_PREDICTION
        ]
        return min(found, key=lambda estimate: estimate.log_mean, default=None)

    def _seconds(self, known: Known, one: Candidate) -> float:
        seconds = known[one].seconds
        assert seconds is not None
        return seconds

    def _found(self, known: Known, one: Candidate) -> TimeAndCost:
        return self.standing(one, self._seconds(known, one))

    def _hopeless(self, name: str, points: list[TimeAndCost]) -> bool:
        """Return whether a found plan beats the slice in time and cost even at the chip's peak rates."""
        group = self.space.by_slice[name]
        ideal = self.standing(group[0], min(map(self._bound_seconds, group)))
        return any(point.equals_or_beats(ideal) for point in points)

    def _bound_seconds(self, one: Candidate) -> float:
        return self.space.sizes.lower_bound_step_seconds(one.slice.chip, one.mesh)

    def _promise(self, name: str) -> float:
        """Return the estimated score of a slice's first guess; smaller is better."""
        guess = min(self.space.by_slice[name], key=self._order(name))
        return self.standing(guess, self.space.guessed_seconds(guess)).score(self.goal)

    def _order(self, name: str, room: float = FIRST_ROOM) -> Callable[[Candidate], tuple[bool, float]]:
        """Return a sort key: candidates that should fit, fastest by estimate; then the others, smallest first."""
        limit = (self.space.by_slice[name][0].slice.chip.usable_bytes or 0) * room

        def order(one: Candidate) -> tuple[bool, float]:
            size = self.space.guessed_bytes(one)
            return (False, self.space.guessed_seconds(one)) if size <= limit else (True, size)

        return order

    def _guesses(self, known: Known, name: str) -> Iterator[Candidate]:
        """Yield the next guess for a slice on which nothing fits yet.

        The compiled peaks of earlier guesses correct the estimates: if a peak was larger than its estimate, the next
        guess must be estimated smaller by the same factor.
        """
        group = self.space.by_slice[name]
        asked = [one for one in group if one in known]
        if len(asked) >= TRIES:
            return
        room = FIRST_ROOM
        for one in asked:
            peak = known[one].peak_bytes
            if peak:
                room = min(room, FIRST_ROOM * self.space.guessed_bytes(one) / peak)
        open_ones = [one for one in group if one not in known and not self._cannot_fit(known, one)]
        if open_ones:
            yield min(open_ones, key=self._order(name, room))

    def _cannot_fit(self, known: Known, one: Candidate) -> bool:
        """Return whether a candidate cannot fit because one that needs no more memory did not fit.

        That is one with the same slice and mesh, a micro-batch that is not larger, and a remat that saves no more.
        A candidate without accumulation is compared only at the same micro-batch: it needs no sum of gradients, so it
        may be the smaller program.
        """
        return any(
            not outcome.fits
            and outcome.peak_bytes is not None
            and other.slice.name == one.slice.name
            and other.mesh == one.mesh
            and other.micro_batch <= one.micro_batch
            and (one.accumulation(self.space.job.batch) > 1 or other.micro_batch == one.micro_batch)
            and _saves_no_more(other.remat, one.remat)
            for other, outcome in known.items()
        )

    def _promising(self, known: Known, centre: Candidate, points: list[TimeAndCost]) -> list[Candidate]:
        """Return the candidates of a slice that may win, with the largest expected gain first."""
        open_ones = [
            (-outlook.gain, n, one)
            for n, (one, outlook) in enumerate(self._outlooks(known, centre, points).items())
            if outlook.rejection is None
        ]
        return [one for _, _, one in sorted(open_ones)]

    def _outlooks(self, known: Known, centre: Candidate, points: list[TimeAndCost]) -> dict[Candidate, Outlook]:
        """Return the prospects of all candidates that are not compiled, on the slice of its best candidate."""
        model = self._model(known, centre.slice.name)
        rest = [one for one in self.space.by_slice[centre.slice.name] if one not in known]
        estimates = zip(rest, model.seconds(rest), model.peak_bytes(rest), strict=True)
        return {one: self._outlook(known, one, centre, points, time, peak) for one, time, peak in estimates}

    def _model(self, known: Known, name: str) -> StepModel:
        """Return the model of a slice, as learned from the known results."""
        results = {one: known[one] for one in self.space.by_slice[name] if one in known}
        return StepModel(
            self.space,
            {one: result.seconds for one, result in results.items() if result.seconds},
            {one: result.peak_bytes for one, result in results.items() if result.peak_bytes},
        )

    def _outlook(
        self,
        known: Known,
        one: Candidate,
        centre: Candidate,
        points: list[TimeAndCost],
        time: Estimate,
        peak: Estimate,
    ) -> Outlook:
        limit = one.slice.chip.usable_bytes or 0

        hoped, expected = (self.standing(one, seconds / (1 - LEAST_GAIN)) for seconds in (time.low(ERRORS), time.mid))
        may_win = hoped.score(self.goal) <= min(point.score(self.goal) for point in points)
        rejection = None
        if self._cannot_fit(known, one):
            rejection = Rejection.MEMORY_PROOF
        elif any(point.equals_or_beats(self.standing(one, self._bound_seconds(one))) for point in points):
            rejection = Rejection.TIME_PROOF
        elif peak.low(ERRORS) > limit:
            rejection = Rejection.MEMORY_PREDICTION
        elif not may_win and any(point.beats(expected) for point in points):
            rejection = Rejection.TIME_PREDICTION
        gain = time.expected_gain(self._seconds(known, centre)) * peak.probability_below(limit)
        return Outlook(time, gain, rejection)


def _saves_no_more(little: Remat, much: Remat) -> bool:
    """Return whether `much` keeps everything in HBM that `little` keeps there."""
    if little == much or much.policy == "none":
        return True
    if "dots" in (little.policy, much.policy):
        return little.policy == "full"
    if little.policy == "none":
        return False
    return kept_names(little) <= kept_names(much) and set(much.offload) <= set(little.offload)
