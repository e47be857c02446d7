"""The choice of the next candidate to compile.

On one slice, cost is proportional to time. So the search looks for the shortest step of each slice:

1. Compile the best guess, then smaller programs until one fits.
2. Compile the neighbours of the best candidate (another remat, the next micro-batch, the next mesh) until none is
   better.

Slices compete by the goal. A slice is skipped if even its lower bound could not win or reach the Pareto front of time
and cost. The choice depends only on the results so far, so an interrupted search resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from forerun.config.schema import Remat
from forerun.planner.search.lower_bound import kept_names
from forerun.planner.search.space import Candidate, Space

Goal = Literal["cheapest", "fastest", "balanced"]
GOALS: tuple[Goal, ...] = ("cheapest", "fastest", "balanced")
FIRST_ROOM = 0.95  # share of HBM that a first guess may fill by the estimate
TRIES = 5  # guesses on a slice on which nothing fits
REFINE = 1.3  # refine a slice only if a step shorter by this factor would reach the front
SLOWER = 1.25  # skip a neighbour that is estimated slower by this factor
LARGER = 1.2  # skip a neighbour that is estimated to exceed the limit by this factor


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

    def score(self, goal: Goal) -> float:
        """Return the value that the goal minimises.

        Balanced minimises time x cost: saving a tenth of the time is worth as much as saving a tenth of the cost.
        """
        if goal == "fastest":
            return self.seconds
        if self.usd is None:
            return float("inf")
        return self.usd if goal == "cheapest" else self.usd * self.seconds


@dataclass(frozen=True)
class Strategy:
    """A search strategy for one space and goal. It has no state: the results so far are passed as `known`."""

    space: Space
    goal: Goal
    usd_per_second: Mapping[str, float | None]  # price of the complete slice, by its name
    # Billed seconds of a run beside its steps, such as its start, per step and by the name of the slice. A short run on
    # a slower machine may be cheaper because of them.
    overhead_seconds: Mapping[str, float] = field(default_factory=dict)

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

        First come guesses on slices without a result that fits, then neighbours of the best on slices that may win.
        """
        best = {name: self.best(known, name) for name in self.space.by_slice}
        points = [self._found(known, one) for one in best.values() if one]
        for name in sorted((name for name, one in best.items() if one is None), key=self._promise):
            if not self._hopeless(name, points):
                yield from self._guesses(known, name)
        found = sorted((one for one in best.values() if one), key=lambda one: self._found(known, one).score(self.goal))
        for n, one in enumerate(found):
            hoped = self.standing(one, self._seconds(known, one) / REFINE)
            if n == 0 or not any(point.beats(hoped) for point in points):
                yield from self._neighbours(known, one)
            if n == 0 and one.slice.name in self.space.as_written:
                yield self.space.as_written[one.slice.name]

    def _seconds(self, known: Known, one: Candidate) -> float:
        seconds = known[one].seconds
        assert seconds is not None
        return seconds

    def _found(self, known: Known, one: Candidate) -> TimeAndCost:
        return self.standing(one, self._seconds(known, one))

    def _hopeless(self, name: str, points: list[TimeAndCost]) -> bool:
        """Return whether a found plan beats the slice in time and cost even at the chip's peak FLOP/s."""
        one = self.space.by_slice[name][0]
        ideal = self.standing(one, self.space.sizes.lower_bound_seconds(one.slice.chip, one.mesh.devices))
        return any(point.beats(ideal) for point in points)

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

    def _neighbours(self, known: Known, centre: Candidate) -> Iterator[Candidate]:
        """Yield the neighbours of `centre`, fastest by estimate first, without those that look too slow or too large.

        Candidates that are estimated to be faster than `centre` and to fit are yielded, too, wherever they are: the
        first guesses may have missed them because of a wrong estimate of memory. Estimates are used only relative to
        those of the centre, whose compiled time and peak are known.
        """
        group = [one for one in self.space.by_slice[centre.slice.name] if one not in known]
        ratio = {one: self.space.guessed_seconds(one) / self.space.guessed_seconds(centre) for one in group}
        peak = known[centre].peak_bytes or 0
        limit = centre.slice.chip.usable_bytes or 0
        base = self.space.guessed_bytes(centre)
        for one in sorted(group, key=lambda one: ratio[one]):
            larger = peak + self.space.guessed_bytes(one) - base
            near = _near(centre, one) and ratio[one] <= SLOWER and larger <= limit * LARGER
            if (near or (ratio[one] < 1 and larger <= limit)) and not self._cannot_fit(known, one):
                yield one


def _near(centre: Candidate, one: Candidate) -> bool:
    """Return whether `one` is a neighbour: the same mesh with a similar micro-batch, or the next mesh.

    With the same mesh, the micro-batch may differ by a factor of 2, or of 4 with the same remat. The next mesh moves a
    factor of 2 between two axes, or has no fsdp. It must have the same remat.
    """
    step = max(centre.micro_batch, one.micro_batch) / min(centre.micro_batch, one.micro_batch)
    if one.mesh == centre.mesh:
        return step <= 2 or (step <= 4 and one.remat == centre.remat)
    here, there = centre.mesh, one.mesh
    ratios = [
        max(a, b) // min(a, b) for a, b in ((here.data, there.data), (here.fsdp, there.fsdp), (here.tp, there.tp))
    ]
    moved = sum(ratio > 1 for ratio in ratios)
    next_mesh = (moved == 2 and max(ratios) <= 2) or (there.fsdp == 1 and there.tp == here.tp)
    return next_mesh and one.remat == centre.remat and step <= 2


def _saves_no_more(little: Remat, much: Remat) -> bool:
    """Return whether `much` keeps everything in HBM that `little` keeps there."""
    if little == much or much.policy == "none":
        return True
    if "dots" in (little.policy, much.policy):
        return little.policy == "full"
    if little.policy == "none":
        return False
    return kept_names(little) <= kept_names(much) and set(much.offload) <= set(little.offload)
