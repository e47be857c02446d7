"""The training loop.

The loop must not delay the devices. They execute dispatched steps one after the other, so the host has the time of one
step for all its own work: recording metrics, progress, the next batch. Work that needs the state of a finished step
(an evaluation, a save) interrupts this overlap. It is therefore done only in steps in which a hook is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from forerun.program.guard import released
from forerun.program.state import Metrics, State
from forerun.run.guard import Action, DivergenceGuard, describe_rejection
from forerun.run.hooks import FinishedStep, Hook
from forerun.run.validation import Validation
from forerun.supervise.worker import Stopped, Worker

T = TypeVar("T")


class StepPipeline:
    """Dispatches steps to the devices and collects their metrics.

    A step is in flight if it was dispatched and its metrics have not been read yet. The host reads them one step late,
    so that it does not wait for the devices. A rejected step is therefore noticed when later steps are in flight
    already. The devices skip those, because a rejected step halts the state, and the pipeline dispatches them again.

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


def run_steps(pipeline: StepPipeline, batches: Iterable[tuple[int, Any]], hooks: Sequence[Hook], first: int) -> State:
    """Run steps until the last one, an agreed stop, or early stopping.

    Metrics are fetched one step late: while the host records step n, the devices already run step n + 1.

    Args:
      pipeline: dispatches steps and collects their metrics. Its state is the initial state.
      batches: step numbers and batches on the devices, until the run stops.
      hooks: validation, checkpoints, metrics and the like. They act in this order at each event.
      first: the step of the initial state: 0, or the step of a checkpoint.

    Returns:
      The state after the last step.

    Raises:
      DivergenceError: too many consecutive steps were rejected.
      CorruptionError: replicas of the state differ.
      RecompileError: something was compiled between steps.
    """

    def record(finished_steps: Iterable[FinishedStep]) -> None:
        for finished in finished_steps:
            for hook in hooks:
                hook.on_finish(finished)

    # ---- Finish what an interrupted run left open, for example an evaluation at its last step ----
    step = first
    for hook in hooks:
        hook.on_start(step, pipeline.state)

    # ---- Training steps ----
    for step, batch in batches:
        pipeline.dispatch(step, batch)
        # The next dispatch donates this state. A hook that reads it has to dispatch its own work now.
        for hook in hooks:
            hook.on_dispatch(step, pipeline.state)

        # A hook that is due needs the final state of this step, so all steps in flight are collected first. If no hook
        # is due, the newest step stays in flight, and the host records the step before it while the devices compute.
        record(pipeline.collect(drain=any(hook.is_due(step) for hook in hooks)))
        # Ask each hook again: a hook may become due through the one before it. For example, the validation may end the
        # run, and then a checkpoint is due.
        for hook in hooks:
            if hook.is_due(step):
                hook.on_step(step, pipeline.state)
        for hook in hooks:
            hook.after_step(step)

    # ---- After a stop, one step is still in flight ----
    record(pipeline.collect(drain=True))
    for hook in hooks:
        hook.on_stop(step, pipeline.state)
    return pipeline.state


def batches_until_stop(
    feed: Iterable[T], first: int, validation: Validation, worker: Worker
) -> Iterator[tuple[int, T]]:
    """Yield step numbers and batches until the last step, early stopping, or the stop that all hosts agreed on.

    Args:
      feed: batches on the devices, from step `first + 1` to the last step.
      first: the step of the initial state.
      validation: reports whether the run ends early.
      worker: agrees with the other hosts on the step at which they stop.
    """
    batches, step = iter(feed), first
    while not validation.is_exhausted:
        try:
            with worker.pulse.waiting("data"):
                batch = next(batches)
        except (StopIteration, Stopped):  # the last batch was used, or a stop was announced while this host waited
            return
        # A step is a collective operation: if one host starts it, all hosts must. `go` returns the same on all hosts.
        if not worker.stop.go():
            return
        step += 1
        yield step, batch
