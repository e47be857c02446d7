"""When the training loop reads the metrics of a step, and when its hooks act."""

from __future__ import annotations

from typing import Any

from forerun.program.guard import Verdict
from forerun.program.state import Metrics
from forerun.run.guard import DivergenceGuard, SkippedSteps
from forerun.run.hooks import FinishedStep, Hook
from forerun.run.steps import StepPipeline, run_steps


class RecordingHook(Hook):
    """Records its events. It is due after step 2."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def on_start(self, step: int, state: Any) -> None:
        self._events.append(f"start {step}")

    def on_finish(self, finished: FinishedStep) -> None:
        self._events.append(f"finish {finished.step}")

    def is_due(self, step: int) -> bool:
        return step == 2

    def on_step(self, step: int, state: Any) -> None:
        self._events.append(f"act {step} on {state}")

    def on_stop(self, step: int, state: Any) -> None:
        self._events.append(f"stop {step}")


def test_metrics_are_read_one_step_late_unless_a_hook_needs_the_state() -> None:
    events: list[str] = []

    def run_step(state: int, batch: int) -> tuple[int, Metrics]:
        events.append(f"dispatch {batch}")
        return state + 1, Metrics(1.0, 1.0, 1.0, batch, verdict=Verdict.TAKEN)

    def fetch(metrics: Metrics) -> Metrics:
        events.append(f"read {metrics.tokens}")
        return metrics

    guard: Any = DivergenceGuard(SkippedSteps({}), in_all=1, in_a_row=1)
    state: Any = 0
    pipeline = StepPipeline(state, guard, run_step, lambda step: step, fetch)  # type: ignore[arg-type]
    batches = [(step, step) for step in (1, 2, 3, 4)]
    assert run_steps(pipeline, batches, [RecordingHook(events)], 0) == 4  # type: ignore[comparison-overlap]
    assert events == [
        *("start 0", "dispatch 1", "dispatch 2"),
        *("read 1", "finish 1", "read 2", "finish 2", "act 2 on 2"),
        *("dispatch 3", "dispatch 4", "read 3", "finish 3"),
        *("read 4", "finish 4", "stop 4"),
    ]
