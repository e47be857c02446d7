from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from error_assertions import raises_error

from forerun.hardware.chips import chip_named
from forerun.hardware.device_memory import MEMORY_SHARE, VARIABLES, DeviceMemory, memory_share, reserve_memory_share
from forerun.hardware.devices import ThisMachine


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


# The share of a GPU's memory: forerun's own, or the user's, and the same for `plan` and `train`.


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_variable_it_is_forerun_s_own() -> None:
    assert memory_share({}).share == MEMORY_SHARE == 0.9
    assert memory_share({VARIABLES[0]: ""}).variable == ""


@pytest.mark.parametrize("name", VARIABLES)
def test_the_user_s_share_counts_and_stays(name: str) -> None:
    environment = {name: "0.5"}
    assert memory_share(environment).share == 0.5
    assert memory_share(environment).variable == name
    reserve_memory_share(environment)
    assert environment == {name: "0.5"}, "jax rejects both variables together"


@pytest.mark.parametrize("value", ["most", "0", "-1", "nan"])
def test_a_share_must_be_a_number_above_zero(value: str) -> None:
    with raises_error("E-HARDWARE-024"):
        memory_share({VARIABLES[1]: value})


def test_jax_reads_the_variable() -> None:
    """jax's own function is the oracle of its names and of the format of the number."""
    from jaxlib import xla_client

    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    reserve_memory_share(environment)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == 0.9
    assert options["preallocate"] is False, "the user's choice stays; the share limits the allocator in both cases"


def test_train_sets_the_share_before_jax_opens_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    def devices(platform: str) -> tuple[Any, ...]:
        seen.append((platform, os.environ.get(VARIABLES[0])))
        return (SimpleNamespace(platform=platform),)

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv(VARIABLES[0], "")  # so that the test's end restores it
    machine = ThisMachine(environment={"JAX_PLATFORMS": "cpu,cuda"})
    machine.devices("cpu")
    machine.devices("gpu")
    assert seen == [("cpu", ""), ("gpu", "0.90")]


def test_the_limit_of_plan_is_the_share() -> None:
    for name in ("h100", "4090"):
        chip = chip_named(name)
        assert chip.gpu is not None
        assert chip.usable_bytes == int(chip.gpu.memory_bytes * 0.9)
