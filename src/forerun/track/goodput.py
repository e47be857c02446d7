"""Goodput: the share of a run's wall time that was spent in steps whose result the run keeps.

`goodput_of` is a pure function of the lines of events.jsonl (`forerun.track.events`). It knows all processes of a run,
which are called sessions here, also those that were killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from forerun.units import Seconds

USEFUL, OTHER = "useful", "other"
LOST = (
    "startup",  # imports, devices, data, and everything else before the compilation
    "compile",
    "restore",  # the initial weights, or those of a checkpoint
    "saves",  # the time for which a save blocks the steps
    "data_wait",
    "restarts",  # from the last sign of a session to the start of the next
    "replayed",  # steps that a later session runs again, and the useful time that they took before
    "validation",
    "samples",
    OTHER,  # the remainder: rejected steps, the end of a run, and time that is not measured
)
CATEGORIES = (USEFUL, *LOST)

# What the time after a `phase` line is, if no later `time` line says it.
_OF_PHASE = {"data": "startup", "compile": "compile", "restore": "restore"}
_MICRO = 1_000_000
SMALLEST_SHARE = 0.001  # of the losses in `goodput_line`


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went.

    Attributes:
      share: useful seconds / wall seconds.
      wall_seconds: from the start of the first session to the last event.
      seconds: by category, in the order of `CATEGORIES`. They are whole microseconds and add up to `wall_seconds`.
    """

    share: float
    wall_seconds: float
    seconds: dict[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The values for a row of metrics: `goodput`, and `lost_*` for the other categories."""
        return shares_of(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        return {"share": self.share, "wall_seconds": self.wall_seconds, "seconds": dict(self.seconds)}


def goodput_of(events: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Return where the wall time of a run went, or None if the events contain no time after a start.

    Args:
      events: the lines of events.jsonl in their order. Lines without a time, and lines before the first `start`, are
        ignored. If a clock goes backwards, no time passes until it reaches the earlier value.
    """
    sessions = list(_sessions(events))
    if not sessions:
        return None
    micros = dict.fromkeys(CATEGORIES, 0)
    kept = math.inf  # the last step whose result the later sessions kept
    for session in reversed(sessions):
        for name, amount in session.micros(kept).items():
            micros[name] += amount
        kept = min(kept, session.resumed)
    for before, after in pairwise(sessions):
        micros["restarts"] += after.began - before.ended
    wall = sessions[-1].ended - sessions[0].began
    if wall <= 0:
        return None
    micros[OTHER] = wall - sum(amount for name, amount in micros.items() if name != OTHER)
    return Goodput(micros[USEFUL] / wall, wall / _MICRO, {name: amount / _MICRO for name, amount in micros.items()})


def goodput_line(entry: Mapping[str, Any]) -> str:
    """Return a line for the user about the goodput in a summary, with the largest losses first."""
    wall, seconds = float(entry["wall_seconds"]), entry["seconds"]
    losses = sorted(((seconds.get(name, 0.0) / wall, name) for name in LOST), reverse=True)
    named = [f"{name.replace('_', ' ')} {share:.1%}" for share, name in losses if share >= SMALLEST_SHARE]
    return f"goodput {entry['share']:.1%} of {Seconds(wall)}" + (f"; lost: {', '.join(named)}" if named else "")


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by category as shares of their sum: `goodput` and `lost_*`. Empty if there is no time."""
    wall = math.fsum(seconds.values())
    if wall <= 0:
        return {}
    names = {USEFUL: "goodput", **{name: f"lost_{name}" for name in LOST}}
    return {names[category]: seconds.get(category, 0.0) / wall for category in CATEGORIES}


@dataclass
class _Session:
    """The lines of one process.

    Attributes:
      began, ended: microseconds of the first and the last line.
      resumed: the step that it starts from. Infinite until a `resume` line, because the session has undone nothing yet.
      totals: the newest cumulative seconds by category.
      marks: (step, cumulative useful seconds), ascending.
      tails: microseconds by category since the newest `time` line, from the phases.
    """

    began: int
    ended: int
    resumed: float = math.inf
    totals: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[float, float]] = field(default_factory=list)
    tails: dict[str, int] = field(default_factory=dict)
    _phase: str = "startup"
    _timed: int = 0

    def add(self, event: Mapping[str, Any], moment: int) -> None:
        self.tails[self._phase] = self.tails.get(self._phase, 0) + moment - self.ended
        self.ended = moment
        kind, step = event.get("event"), _number(event.get("step"))
        if kind == "phase":
            self._phase = _OF_PHASE.get(str(event.get("name")), OTHER)
        elif kind == "resume" and step is not None:
            self.resumed = min(self.resumed, step)
        elif kind == "time" and isinstance(seconds := event.get("seconds"), Mapping):
            found = {name: _number(seconds.get(name)) or 0.0 for name in CATEGORIES}
            self.totals = {name: max(0.0, value) for name, value in found.items()}
            self.tails, self._timed = {}, moment - self.began
            if step is not None:
                self.marks.append((step, self.totals[USEFUL]))

    def micros(self, kept: float) -> dict[str, int]:
        """Return the microseconds by category, without `other`. Useful time after step `kept` counts as replayed."""
        whole = math.fsum(self.totals.values())
        # A clock that was set during the session can make its parts longer than the whole.
        scale = min(1.0, self._timed / _MICRO / whole) if whole else 0.0
        useful = self.totals.get(USEFUL, 0.0)
        useful_kept = min(useful, self._useful_until(kept))
        parts = self.totals | {USEFUL: useful_kept, "replayed": self.totals.get("replayed", 0.0) + useful - useful_kept}
        result = {name: int(value * scale * _MICRO) for name, value in parts.items()}
        excess = sum(result.values()) - self._timed  # at most rounding errors of the multiplication
        for name in sorted(result, key=lambda name: -result[name]):
            cut = min(max(0, excess), result[name])
            result[name] -= cut
            excess -= cut
        for name, amount in self.tails.items():
            result[name] = result.get(name, 0) + amount
        result.pop(OTHER, None)
        return result

    def _useful_until(self, step: float) -> float:
        """Return the useful seconds up to a step, interpolated between the `time` lines."""
        first = self.resumed if math.isfinite(self.resumed) else 0.0
        before_step, before = min(first, step), 0.0
        if step <= first:
            return 0.0
        for mark_step, seconds in self.marks:
            if mark_step >= step:
                between = mark_step - before_step
                share = (step - before_step) / between if between > 0 else 1.0
                return before + (seconds - before) * share
            before_step, before = mark_step, seconds
        return math.inf


def _sessions(events: Sequence[Mapping[str, Any]]) -> Iterator[_Session]:
    session: _Session | None = None
    latest: int | None = None
    for event in events:
        seconds = _number(event.get("unix_seconds"))
        if seconds is None:
            continue
        moment = round(seconds * _MICRO)
        latest = moment if latest is None else max(latest, moment)
        if event.get("event") == "start":
            if session is not None:
                yield session
            session = _Session(latest, latest)
        elif session is None:
            latest = None
        else:
            session.add(event, latest)
    if session is not None:
        yield session


def _number(value: Any) -> float | None:
    """Return a finite number, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
