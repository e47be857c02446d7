from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import pytest

from forerun.hardware.device_memory import DeviceMemory


class Device:
    """A device with given counters. It counts how often they are read."""

    def __init__(self, statistics: Mapping[str, Any] | Exception | None) -> None:
        self._statistics, self.reads = statistics, 0

    def memory_stats(self) -> Mapping[str, Any] | None:
        self.reads += 1
        if isinstance(self._statistics, Exception):
            raise self._statistics
        return self._statistics


def test_the_largest_device_counts() -> None:
    first = Device({"bytes_in_use": 5, "peak_bytes_in_use": 40, "num_allocs": 3})
    second = Device({"bytes_in_use": 6, "peak_bytes_in_use": 30, "num_allocs": 4})
    assert DeviceMemory([first, second]).read() == {"hbm_bytes": 6, "hbm_peak_bytes": 40}


def test_a_counter_that_is_not_reported_is_omitted() -> None:
    assert DeviceMemory([Device({"bytes_in_use": 0})]).read() == {"hbm_bytes": 0}


@pytest.mark.parametrize("statistics", [None, {}, jax.errors.JaxRuntimeError("UNIMPLEMENTED: memory stats")])
def test_a_backend_without_counters_is_asked_once(statistics: Mapping[str, Any] | Exception | None) -> None:
    device = Device(statistics)
    memory = DeviceMemory([device])
    assert memory.read() == memory.read() == {}
    assert device.reads == 1


def test_the_cpu_of_this_machine_reports_nothing() -> None:
    assert DeviceMemory(jax.devices("cpu")).read() == {}
