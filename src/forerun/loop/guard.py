"""What happens after a step that the device refused: once more, and if that fails too, without its batch.

A passing fault is gone the second time, and the run is the one it would have been. A fault of the batch comes back:
the step is left out, and the run is the one of data that never had the batch. If the next batch is a spike too, it is
not the batch but a steep place that the weights have come to; a clipped step leads out of it, so it is taken. Weights
that are no numbers fail on every batch, which stops the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import jax

from forerun.checkpoint.hosts import is_first, told_by_first
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.loop.folder import RunFolder
from forerun.loop.saved_files import SavedFiles
from forerun.program.guard import Verdict, released
from forerun.program.state import Metrics, State
from forerun.supervise.limits import DAMAGED
from forerun.track.skips import SkipFile

A_SPIKE = "a spike"


class Skips(Protocol):
    """Steps that were left out and why, kept so that a killed run knows them again."""

    known: dict[int, str]

    def add(self, step: int, why: str) -> None: ...

    def forget(self, steps: list[int]) -> None: ...


@dataclass
class Remembered:
    """In memory only: for the hosts that write no files."""

    known: dict[int, str]

    def add(self, step: int, why: str) -> None:
        self.known[step] = why

    def forget(self, steps: list[int]) -> None:
        for step in steps:
            self.known.pop(step, None)


class Lost(UserError):
    """A supervisor starts again from the newest checkpoint, which mends a state that was damaged in memory."""

    exit_code = DAMAGED


class Action(Enum):
    GO_ON = "go on"
    REPLAY = "replay"
    SKIP = "skip"
    ALLOW = "allow"


class Guard:
    """Decides, from the figures of one step after the other; the same on every host, for all read the same figures.

    Args:
      skips: of this run so far, also of processes before this one.
      in_all, in_a_row: how many batches may be left out.
    """

    def __init__(self, skips: Skips, *, in_all: int, in_a_row: int) -> None:
        self.skips = skips
        self._in_all, self._in_a_row = in_all, in_a_row
        self._tried: int | None = None
        self._row: list[tuple[int, str]] = []

    @property
    def trusts_state(self) -> bool:
        """Not while steps are being left out: the state they failed on may be the fault."""
        return not self._row

    def after(self, number: int, figures: Metrics) -> Action:
        """What to do now that step `number` has these figures."""
        if figures.verdict == Verdict.TAKEN:
            self._tried, self._row = None, []
            return Action.GO_ON
        if figures.verdict == Verdict.HALTED:
            raise RuntimeError(f"step {number} ran on a halted state")
        if self._tried != number:
            self._tried = number
            return Action.REPLAY
        if figures.verdict == Verdict.SPIKE and self._spiked_before(number):
            return Action.ALLOW
        self._tried = None
        why = said(figures)
        self._row.append((number, why))
        if len(self._row) > self._in_a_row:
            self.skips.forget([step for step, _ in self._row])
            raise self._lost()
        if len(self.skips.known) >= self._in_all:
            raise self._too_many()
        self.skips.add(number, why)
        return Action.SKIP

    def _spiked_before(self, number: int) -> bool:
        """Whether the step before this one was left out for a spike too."""
        return bool(self._row) and self._row[-1][0] == number - 1 and self._row[-1][1].endswith(A_SPIKE)

    def left_out_before(self, number: int) -> str | None:
        """Why, if a process before this one has left it out."""
        return self.skips.known.get(number)

    def passed_over(self, number: int, why: str) -> None:
        self._row.append((number, why))

    def _lost(self) -> Lost:
        (first, what), (last, _) = self._row[0], self._row[-1]
        return Lost(
            f"step {first}: {what}" + (f"; and so on, every step up to {last}" if last > first else ""),
            why=f"more than {self._in_a_row} in a row (guard.in_a_row) is not one batch, so it is the weights; "
            "none of these steps was taken or saved",
            fix="lower optimizer.lr or raise optimizer.warmup and start over with --fresh (what is there is kept, "
            "renamed);\nthe same command alone resumes from the last checkpoint, which helps if memory was damaged",
        )

    def _too_many(self) -> UserError:
        number, what = self._row[-1]
        listed = ", ".join(map(str, sorted(self.skips.known))) or "none"
        return UserError(
            f"step {number}: {what}; more than {self._in_all} batches would be left out",
            why=f"left out so far: steps {listed} (ledger.jsonl names their examples)",
            fix="mend the data, lower optimizer.lr, or allow more with guard.skips=...",
        )


def guard_of(job: Job, folder: RunFolder, before: SavedFiles, tell: Callable[[str], None]) -> Guard:
    """Return the guard with the steps that were skipped before. The first host has them and tells the others."""
    skips: Skips = Remembered({})
    if is_first():
        skips = SkipFile(folder.skips, identity=before.identity, step=before.step, saved=before.skips, tell=tell)
    if jax.process_count() > 1:
        steps = [
            -step if why.endswith(A_SPIKE) else step for step, why in sorted(skips.known.items())
        ]  # one number each
        steps += [0] * (told_by_first(len(steps)) - len(steps))
        told = [told_by_first(step) for step in steps]
        known = {abs(step): f"told by the first host{f', {A_SPIKE}' if step < 0 else ''}" for step in told}
        skips = skips if is_first() else Remembered(known)
    return Guard(skips, in_all=job.guard.skips, in_a_row=job.guard.in_a_row)


def said(figures: Metrics) -> str:
    """Why a step was refused, in figures."""
    loss, norm = float(figures.loss), float(figures.grad_norm)
    told = f"loss {loss:.4g}, gradient norm {norm:.4g}"
    return f"{told}, {A_SPIKE}" if figures.verdict == Verdict.SPIKE else told


@dataclass(frozen=True)
class Landed:
    """A step that is settled."""

    number: int
    figures: Metrics | None  # on the host; None if it was left out
    refused: str | None = None  # why its first try was not taken, if so
    allowed: bool = False  # taken as it was, because the one before was a spike too

    @property
    def left_out(self) -> str | None:
        """Why, if it was."""
        return self.refused if self.figures is None else None

    @property
    def warning(self) -> str | None:
        """For people, if anything went wrong."""
        if self.refused is None:
            return None
        if self.figures is None:
            return f"step {self.number}: {self.refused}, twice; its batch is left out, the weights did not take it"
        if self.allowed:
            return f"step {self.number}: {self.refused} again, so it is the weights and not the batch: taken, clipped"
        return (
            f"step {self.number}: {self.refused}; run again from the state before it, it is healthy: "
            "a passing fault, of the hardware most likely"
        )

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl says of it: beside the usual figures, or instead of them if it was left out."""
        if self.refused is None:
            return {}
        return {"skipped" if self.figures is None else "allowed" if self.allowed else "replayed": self.refused}


class Flights:
    """Steps that were dispatched and are not settled yet, oldest first.

    Args:
      step: the compiled step; it may give its state away.
      batch_of: builds the batch of a step number once more, from the data: what was on the device may be the fault.
      read: brings figures to the host.
    """

    def __init__(
        self,
        guard: Guard,
        step: Callable[[State, Any], tuple[State, Metrics]],
        batch_of: Callable[[int], Any],
        read: Callable[[Metrics], Metrics],
    ) -> None:
        self._guard, self._step, self._batch_of, self._read = guard, step, batch_of, read
        self._waiting: deque[tuple[int, Metrics | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, state: State, number: int, batch: Any) -> State:
        """Dispatch a step. The result is a promise: `land` looks at it."""
        if self._guard.left_out_before(number) is not None:
            self._waiting.append((number, None))
            return state
        state, metrics = self._step(state, batch)
        self._waiting.append((number, metrics))
        return state

    def land(self, state: State) -> tuple[State, Landed]:
        """Wait for the oldest step and settle it: taken, taken at the second try, or left out."""
        refused: str | None = None
        allowed = False
        while True:
            number, metrics = self._waiting[0]
            if metrics is None:
                why = self._guard.left_out_before(number)
                assert why is not None
                self._guard.passed_over(number, why)
                self._waiting.popleft()
                return state, Landed(number, None, why)
            figures = self._read(metrics)
            action = self._guard.after(number, figures)
            if action is Action.GO_ON:
                self._waiting.popleft()
                return state, Landed(number, figures, refused, allowed)
            refused = said(figures)
            if action is Action.SKIP:
                self._waiting.popleft()
                return self._again(state), Landed(number, None, refused)
            allowed = allowed or action is Action.ALLOW
            state = self._again(state, disarmed=action is Action.ALLOW)

    def _again(self, state: State, *, disarmed: bool = False) -> State:
        """All that wait, dispatched anew: behind a refused step none of them did anything."""
        assert state.watch is not None
        state = replace(state, watch=released(state.watch, disarmed=disarmed))
        numbers = [number for number, _ in self._waiting]
        self._waiting.clear()
        for number in numbers:
            state = self.start(state, number, self._batch_of(number))
        return state
