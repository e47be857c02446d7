"""The pipeline of steps between the host and the devices.

A step is in flight if it was dispatched and its metrics have not been read yet. The host reads them one step late, so
that it does not wait for the devices. A rejected step is therefore noticed when later steps are in flight already. The
devices skip those, because a rejected step halts the state, and the pipeline dispatches them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from forerun.program.guard import released
from forerun.program.state import Metrics, State
from forerun.run.guard import Action, DivergenceGuard, describe_rejection


@dataclass(frozen=True)
class FinishedStep:
    """A step whose outcome is final: taken, taken at a later try, or skipped.

    Args:
      step: its number; the first step of a run is 1.
      metrics: its metrics on the host, or None if the step was skipped.
      rejection: why the device rejected its first try, or None if it did not.
      allowed: whether it is a spike that was taken, because the step before it was skipped for a spike too.
    """

    step: int
    metrics: Metrics | None
    rejection: str | None = None
    allowed: bool = False

    @property
    def skip_reason(self) -> str | None:
        """Return why the step was skipped, or None if it was taken."""
        return self.rejection if self.metrics is None else None

    @property
    def warning(self) -> str | None:
        """Return a message for the user if the first try was rejected, else None."""
        if self.rejection is None:
            return None
        if self.metrics is None:
            return f"step {self.step}: {self.rejection}, twice; its batch is skipped, the weights are unchanged"
        if self.allowed:
            return f"step {self.step}: {self.rejection} again, so the batch is not the cause: the clipped step is taken"
        return (
            f"step {self.step}: {self.rejection}; the second try succeeded, so the fault was transient, "
            "most likely in the hardware"
        )

    def metrics_row(self) -> dict[str, Any]:
        """Return what metrics.jsonl records about a rejected first try, or an empty row if there was none."""
        if self.rejection is None:
            return {}
        outcome = "skipped" if self.metrics is None else "allowed" if self.allowed else "replayed"
        return {outcome: self.rejection}


class StepPipeline:
    """Dispatches steps to the devices and collects their metrics.

    Args:
      state: the state before the first step, on the devices.
      guard: decides what happens after a rejected step.
      run_step: the compiled step. It may donate its state.
      build_batch: builds the batch of a step again from the data. The copy on the device may be damaged.
      fetch: copies metrics to the host, and waits for them.
    """

    def __init__(
        self,
        state: State,
        guard: DivergenceGuard,
        run_step: Callable[[State, Any], tuple[State, Metrics]],
        build_batch: Callable[[int], Any],
        fetch: Callable[[Metrics], Metrics],
    ) -> None:
        self.state = state
        self._guard, self._run_step, self._build_batch, self._fetch = guard, run_step, build_batch, fetch
        # Oldest first. A step without metrics was skipped by an earlier process, so it is not run.
        self._in_flight: deque[tuple[int, Metrics | None]] = deque()

    def dispatch(self, step: int, batch: Any) -> None:
        """Start a step. `state` becomes its result, which the devices may still be computing."""
        if self._guard.known_skip(step) is not None:
            self._in_flight.append((step, None))
            return
        self.state, metrics = self._run_step(self.state, batch)
        self._in_flight.append((step, metrics))

    def collect(self, *, drain: bool) -> Iterator[FinishedStep]:
        """Yield the finished steps, oldest first.

        Without `drain`, the newest step stays in flight: the devices run it while the host records the one before.
        """
        while len(self._in_flight) > (0 if drain else 1):
            yield self._collect_oldest()

    def _collect_oldest(self) -> FinishedStep:
        """Wait for the oldest step in flight. Repeat it until the guard takes or skips it."""
        rejection: str | None = None
        allowed = False
        while True:
            step, metrics = self._in_flight[0]
            if metrics is None:
                reason = self._guard.known_skip(step)
                assert reason is not None
                self._guard.count_known_skip(step, reason)
                self._in_flight.popleft()
                return FinishedStep(step, None, reason)
            fetched = self._fetch(metrics)
            action = self._guard.decide(step, fetched)
            if action is Action.CONTINUE:
                self._in_flight.popleft()
                return FinishedStep(step, fetched, rejection, allowed)
            rejection = describe_rejection(fetched)
            if action is Action.SKIP:
                # The steps behind it ran on a halted state. They are dispatched again, without the skipped one.
                self._in_flight.popleft()
                self._dispatch_again()
                return FinishedStep(step, None, rejection)
            allowed = allowed or action is Action.ALLOW
            self._dispatch_again(disarmed=action is Action.ALLOW)

    def _dispatch_again(self, *, disarmed: bool = False) -> None:
        """Release the halted state and dispatch all steps in flight again.

        The state is the one before the rejected step: neither that step nor those behind it changed it.
        """
        self.state = replace(self.state, watch=released(self.state.watch, disarmed=disarmed))
        steps = [step for step, _ in self._in_flight]
        self._in_flight.clear()
        for step in steps:
            self.dispatch(step, self._build_batch(step))
