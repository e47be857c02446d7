from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.hardware.device_memory import DeviceMemory
from forerun.program.state import Metrics
from forerun.run import throughput as pace_module
from forerun.run.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class Device:
    """The memory counters of a TPU, which this machine does not have."""

    def __init__(self, now: int, peak: int) -> None:
        self._statistics = {"bytes_in_use": now, "peak_bytes_in_use": peak, "bytes_limit": 100}

    def memory_stats(self) -> dict[str, int]:
        return self._statistics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


def program(steps: int) -> Any:
    """What Throughput reads: a step of 4000 tokens and 6e12 FLOPs."""
    method = SimpleNamespace(objective=SimpleNamespace(unit="tokens"))
    derived = SimpleNamespace(steps=steps, batch=8, tokens_per_step=4000, steps_per_epoch=2.5)
    return SimpleNamespace(derived=derived, flops_per_step=6e12, method=method)


def run(throughput: Throughput, clock: Clock, step_seconds: list[float], waited_seconds: float = 0.0) -> None:
    throughput.start()
    for number, seconds in enumerate(step_seconds, throughput.first + 1):
        clock.now += seconds
        throughput.finish(number, Metrics(loss=10.0 - number, grad_norm=2.0, lr=1e-3, tokens=3990.0), waited_seconds)


def test_speed_and_end_from_the_median_step(clock: Clock) -> None:
    throughput = Throughput(program(100), 0, peak_flops=24e12)
    clock.now += 60  # whatever happens before the first step does not count
    run(throughput, clock, [9.0, 0.5, 0.5, 0.5, 4.0])
    view = throughput.view()
    assert (view.step, view.steps) == (5, 100)
    assert view.tokens_per_second == 8000
    assert view.eta_seconds == 95 * 0.5
    assert view.mfu == pytest.approx(6e12 / 0.5 / 24e12)
    assert throughput.total_seconds == 14.5


def test_only_recent_steps_count(clock: Clock) -> None:
    throughput = Throughput(program(100), 0, None)
    run(throughput, clock, [8.0] * 30 + [2.0] * 20)
    assert throughput.view().eta_seconds == 50 * 2.0
    assert throughput.view().mfu is None, "no peak is known, so no share of it"


def test_a_resumed_run_has_the_rest_to_go(clock: Clock) -> None:
    throughput = Throughput(program(100), 90, None)
    run(throughput, clock, [1.0, 1.0])
    assert throughput.view().step == 92
    assert throughput.view().eta_seconds == 8.0


def test_the_wait_is_a_share_of_the_whole_time(clock: Clock) -> None:
    throughput = Throughput(program(4), 0, None)
    assert throughput.wait_share == 0.0
    run(throughput, clock, [2.0, 2.0, 4.0], waited_seconds=2.0)
    assert throughput.wait_share == 0.25


def test_the_line_of_metrics(clock: Clock) -> None:
    throughput = Throughput(program(4), 0, None)
    run(throughput, clock, [2.0, 3.0], waited_seconds=1.0)
    assert throughput.take_metrics_row() == {
        "loss": 8.0,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 3990,
        "step_seconds": 3.0,
        "wait_share": 0.2,
        "tokens_per_second": 2 * 4000 / 5.0,
        "samples_per_second": 2 * 8 / 5.0,
        "epoch": 2 / 2.5,
        "epoch_seconds": 2.5 * 2.5,
    }, "no MFU without a peak, and no memory without a device that reports it"


def test_rates_are_those_since_the_last_row(clock: Clock) -> None:
    throughput = Throughput(program(9), 0, peak_flops=24e12, memory=DeviceMemory([Device(7, 9)]))
    run(throughput, clock, [1.0, 1.0])
    throughput.take_metrics_row()
    clock.now += 50.0
    throughput.exclude()  # an evaluation
    for step, seconds in ((3, 2.0), (4, 4.0), (5, 3.0)):
        clock.now += seconds
        throughput.finish(step, Metrics(loss=1.0, grad_norm=2.0, lr=1e-3, tokens=1.0), 0.0)
    row = throughput.take_metrics_row()
    assert row["tokens_per_second"] == pytest.approx(3 * 4000 / 9.0)
    assert row["samples_per_second"] == pytest.approx(3 * 8 / 9.0)
    assert row["mfu"] == pytest.approx(3 * 6e12 / 9.0 / 24e12)
    assert row["epoch"] == 2.0
    assert row["epoch_seconds"] == pytest.approx(2.5 * 3.0)
    assert (row["hbm_bytes"], row["hbm_peak_bytes"]) == (7, 9)


def test_a_step_that_was_left_out_has_no_figures_but_its_time_passed(clock: Clock) -> None:
    throughput = Throughput(program(4), 0, None)
    run(throughput, clock, [2.0, 3.0])
    clock.now += 7.0
    throughput.skip(3)
    assert (throughput.step, throughput.loss) == (3, 8.0)
    clock.now += 2.0
    throughput.finish(4, Metrics(loss=5.0, grad_norm=2.0, lr=1e-3, tokens=3990.0), 0.0)
    assert throughput.step_seconds == [2.0, 3.0, 2.0]
    assert throughput.total_seconds == 14.0
