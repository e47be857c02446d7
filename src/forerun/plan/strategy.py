"""Which candidate to compile next, from what is known so far and nothing else.

On one slice money is time, so each slice is searched for its shortest step: a best guess first, thriftier ones until
one fits, then the neighbours of the best (another remat, the next micro-batch, the next mesh) until none is better.
Slices compete by the goal; one that could not win or join the front of time and money even with a bound on its side
is left alone. Being a function of what is known, a search goes on after any interruption where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from forerun.config.schema import Remat
from forerun.plan.candidates import Candidate, Space
from forerun.plan.footprint import kept_names

Goal = Literal["cheapest", "fastest", "balanced"]
GOALS: tuple[Goal, ...] = ("cheapest", "fastest", "balanced")
FIRST_ROOM = 0.95  # of HBM that a first guess may fill by formula
TRIES = 5  # guesses on a slice on which nothing fits
REFINE = 1.3  # a slice is refined if a step so much shorter would matter
SLOWER = 1.25  # a neighbour that is guessed so much slower is not asked
LARGER = 1.2  # nor one that is guessed so much over the limit


@dataclass(frozen=True)
class Outcome:
    """What the compiler said. `seconds` is None if the candidate does not fit or could not be compiled."""

    seconds: float | None
    peak_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.seconds is not None


Known = Mapping[Candidate, Outcome]


@dataclass(frozen=True)
class Standing:
    """A point of time and money: seconds of a step, and USD of a step (or None where no price is known)."""

    seconds: float
    usd: float | None

    def beats(self, other: Standing) -> bool:
        """At least as good in both, better in one. A price that is not known beats none and is beaten by time."""
        if self.usd is None or other.usd is None:
            return other.usd is None and self.seconds < other.seconds
        return (
            self.seconds <= other.seconds
            and self.usd <= other.usd
            and (self.seconds < other.seconds or self.usd < other.usd)
        )

    def score(self, goal: Goal) -> float:
        """Smaller is better. Balanced is time x money: a tenth of one is worth a tenth of the other."""
        if goal == "fastest":
            return self.seconds
        if self.usd is None:
            return float("inf")
        return self.usd if goal == "cheapest" else self.usd * self.seconds


@dataclass(frozen=True)
class Strategy:
    """`usd_per_second` is of the whole slice, by name."""

    space: Space
    goal: Goal
    usd_per_second: Mapping[str, float | None]

    def standing(self, one: Candidate, seconds: float) -> Standing:
        rate = self.usd_per_second[one.slice.name]
        return Standing(seconds, None if rate is None else rate * seconds)

    def best(self, known: Known, name: str) -> Candidate | None:
        """The shortest step found on a slice."""
        fitting = [(known[one].seconds, n, one) for n, one in enumerate(self.space.by_slice[name]) if one in known]
        found = [(seconds, n, one) for seconds, n, one in fitting if seconds is not None]
        return min(found)[2] if found else None

    def next(self, known: Known, running: Collection[Candidate] = ()) -> Candidate | None:
        """The most promising question that is still open, or None if there is nothing to ask (now)."""
        for one in self.proposals(known):
            if one not in known and one not in running:
                return one
        return None

    def proposals(self, known: Known) -> Iterator[Candidate]:
        """Open questions, most promising first: a first answer on each slice, then better ones on those that count."""
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

    def _found(self, known: Known, one: Candidate) -> Standing:
        return self.standing(one, self._seconds(known, one))

    def _hopeless(self, name: str, points: list[Standing]) -> bool:
        """Even at its peak the slice is beaten in both time and money by what was found."""
        one = self.space.by_slice[name][0]
        ideal = self.standing(one, self.space.sizes.least_seconds(one.slice.chip, one.mesh.devices))
        return any(point.beats(ideal) for point in points)

    def _promise(self, name: str) -> float:
        guess = min(self.space.by_slice[name], key=self._order(name))
        return self.standing(guess, self.space.guessed_seconds(guess)).score(self.goal)

    def _order(self, name: str, room: float = FIRST_ROOM) -> Callable[[Candidate], tuple[bool, float]]:
        """Fastest by guess among those that should fit; behind them the others, smallest first."""
        limit = (self.space.by_slice[name][0].slice.chip.usable_bytes or 0) * room

        def order(one: Candidate) -> tuple[bool, float]:
            size = self.space.guessed_bytes(one)
            return (False, self.space.guessed_seconds(one)) if size <= limit else (True, size)

        return order

    def _guesses(self, known: Known, name: str) -> Iterator[Candidate]:
        """One first guess; after each that does not fit, the fastest of those that are small enough by its measure."""
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
        """The same with a smaller or equal micro-batch, saving less or the same, did not fit.

        The whole batch at once is apart: it needs no sum of gradients, so it may be the smaller program.
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
        """Fastest by guess first. The centre's measured time and peak carry the guesses to where they are needed."""
        near = [one for one in self.space.by_slice[centre.slice.name] if one not in known and _near(centre, one)]
        ratio = {one: self.space.guessed_seconds(one) / self.space.guessed_seconds(centre) for one in near}
        peak = known[centre].peak_bytes or 0
        limit = centre.slice.chip.usable_bytes or 0
        base = self.space.guessed_bytes(centre)
        for one in sorted(near, key=lambda one: ratio[one]):
            larger = peak + self.space.guessed_bytes(one) - base
            if ratio[one] <= SLOWER and larger <= limit * LARGER and not self._cannot_fit(known, one):
                yield one


def _near(centre: Candidate, one: Candidate) -> bool:
    """Another remat with the same or the next micro-batch, or the next mesh with the same remat."""
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
    """Whether `much` keeps in HBM all that `little` keeps there."""
    if little == much or much.policy == "none":
        return True
    if "dots" in (little.policy, much.policy):
        return little.policy == "full"
    if little.policy == "none":
        return False
    return kept_names(little) <= kept_names(much) and set(much.offload) <= set(little.offload)
