from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.loop import pace as pace_module
from forerun.loop.pace import Pace
from forerun.program.state import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


def program(steps: int) -> Any:
    """What Pace looks at: a step of 4000 tokens and 6e12 FLOPs."""
    method = SimpleNamespace(objective=SimpleNamespace(unit="tokens"))
    derived = SimpleNamespace(steps=steps, tokens_per_step=4000)
    return SimpleNamespace(derived=derived, flops_per_step=6e12, method=method)


def run(pace: Pace, clock: Clock, step_seconds: list[float], waited_seconds: float = 0.0) -> None:
    pace.start()
    for number, seconds in enumerate(step_seconds, pace.first + 1):
        clock.now += seconds
        pace.done(number, Metrics(loss=10.0 - number, grad_norm=2.0, lr=1e-3, tokens=3990.0), waited_seconds)


def test_speed_and_end_from_the_median_step(clock: Clock) -> None:
    pace = Pace(program(100), 0, peak_flops=24e12)
    clock.now += 60  # whatever happens before the first step does not count
    run(pace, clock, [9.0, 0.5, 0.5, 0.5, 4.0])
    view = pace.view()
    assert (view.step, view.steps) == (5, 100)
    assert view.tokens_per_second == 8000
    assert view.eta_seconds == 95 * 0.5
    assert view.mfu == pytest.approx(6e12 / 0.5 / 24e12)
    assert pace.total_seconds == 14.5


def test_only_recent_steps_count(clock: Clock) -> None:
    pace = Pace(program(100), 0, None)
    run(pace, clock, [8.0] * 30 + [2.0] * 20)
    assert pace.view().eta_seconds == 50 * 2.0
    assert pace.view().mfu is None, "no peak is known, so no share of it"


def test_a_resumed_run_has_the_rest_to_go(clock: Clock) -> None:
    pace = Pace(program(100), 90, None)
    run(pace, clock, [1.0, 1.0])
    assert pace.view().step == 92
    assert pace.view().eta_seconds == 8.0
    assert pace.first_loss == 10.0 - 91


def test_the_wait_is_a_share_of_the_whole_time(clock: Clock) -> None:
    pace = Pace(program(4), 0, None)
    assert pace.wait_share == 0.0
    run(pace, clock, [2.0, 2.0, 4.0], waited_seconds=2.0)
    assert pace.wait_share == 0.25


def test_the_line_of_metrics(clock: Clock) -> None:
    pace = Pace(program(4), 0, None)
    run(pace, clock, [2.0, 3.0], waited_seconds=1.0)
    assert pace.figures() == {
        "loss": 8.0,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 3990,
        "step_seconds": 3.0,
        "wait_share": 0.2,
    }


def test_a_step_that_was_left_out_has_no_figures_but_its_time_passed(clock: Clock) -> None:
    pace = Pace(program(4), 0, None)
    run(pace, clock, [2.0, 3.0])
    clock.now += 7.0
    pace.left_out(3)
    assert (pace.number, pace.loss) == (3, 8.0)
    clock.now += 2.0
    pace.done(4, Metrics(loss=5.0, grad_norm=2.0, lr=1e-3, tokens=3990.0), 0.0)
    assert pace.step_seconds == [2.0, 3.0, 2.0]
    assert pace.total_seconds == 14.0
