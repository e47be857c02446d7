"""Memory in use on devices, as their runtime reports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

CURRENT, PEAK = "hbm_bytes", "hbm_peak_bytes"
_STATISTICS = {CURRENT: "bytes_in_use", PEAK: "peak_bytes_in_use"}  # names of JAX


class MemoryDevice(Protocol):
    """The part of a `jax.Device` that this module uses."""

    def memory_stats(self) -> Mapping[str, Any] | None:
        """Return counters of the allocator, or None if the backend has none. This does not wait for the device."""


class DeviceMemory:
    """The memory of some devices. TPUs and GPUs report it; the CPU backend does not.

    A backend without these counters is asked once only, so that it costs nothing in later steps.
    """

    def __init__(self, devices: Iterable[MemoryDevice]) -> None:
        self._devices = [device for device in devices if _statistics(device)]

    def read(self) -> dict[str, int]:
        """Return the bytes in use now and at most so far, each of the device with the largest number.

        A number that no device reports is omitted. The peak counts from the start of the process.
        """
        found = [_statistics(device) for device in self._devices]
        return {
            name: max(int(statistics[key]) for statistics in found if key in statistics)
            for name, key in _STATISTICS.items()
            if any(key in statistics for statistics in found)
        }

    def fullest(self) -> tuple[int, int | None] | None:
        """Return the bytes in use and the limit of the device with the most bytes in use.

        The limit is None if the device has none. The result is None if no device reports its memory.
        """
        used, limit = _STATISTICS[CURRENT], "bytes_limit"
        found = [statistics for device in self._devices if used in (statistics := _statistics(device))]
        most = max(found, key=lambda statistics: int(statistics[used]), default=None)
        if most is None:
            return None
        return int(most[used]), int(most[limit]) if most.get(limit) else None


def _statistics(device: MemoryDevice) -> Mapping[str, Any]:
    """Return the counters of a device. Empty if its backend has none: some return None, others raise."""
    try:
        return device.memory_stats() or {}
    except RuntimeError:  # jax.errors.JaxRuntimeError with the status UNIMPLEMENTED
        return {}
