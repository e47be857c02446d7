"""The training loop.

The loop must not delay the devices. They execute dispatched steps one after the other, so the host has the time of one
step for all its own work: recording metrics, progress, the next batch. Work that needs the state of a finished step
(an evaluation, a save) interrupts this overlap. It is therefore done only in steps in which a hook is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from forerun.program.state import State
from forerun.run.hooks import Hook
from forerun.run.pipeline import FinishedStep, StepPipeline
from forerun.run.validation import Validation
from forerun.supervise.worker import Stopped, Worker

T = TypeVar("T")


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
