"""Memory of devices: the share of a GPU's memory that jax uses for arrays, and the memory in use.

`plan` and `train` use the same share. jax's allocator is limited to it, whether it reserves it at the start or not.
jaxlib also gives the limit to the compiler, which computes values again instead of keeping them if the program does not
fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.errors import UserError

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


# jax's own default is 0.75. The rest is for the CUDA context, NCCL's buffers and libraries (assumed, 2026-11: NVIDIA's
# recipes for JAX use 0.8 to 0.95).
MEMORY_SHARE = 0.90
# jax reads both and rejects them together. The second one is deprecated.
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
VARIABLES = (VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclass(frozen=True)
class MemoryShare:
    """The share of a GPU's memory for arrays, and the environment variable that sets it; empty: forerun's own."""

    share: float
    variable: str = ""


def memory_share(environment: Mapping[str, str] = os.environ) -> MemoryShare:
    """Return the share that the user sets for jax, or forerun's own.

    Raises:
        UserError: The user's value is not a number above 0.
    """
    variable = next((name for name in VARIABLES if environment.get(name)), "")
    if not variable:
        return MemoryShare(MEMORY_SHARE)
    try:
        share = float(environment[variable])
    except ValueError:
        share = 0.0
    if not share > 0:
        raise UserError(
            "E-HARDWARE-024",
            f"{variable}={environment[variable]} is not a share of the GPU's memory",
            why="jax reserves this share of each GPU's memory for arrays",
            fix=f"unset {variable} (forerun then uses {MEMORY_SHARE:.2f}), or set a number such as 0.8",
        )
    return MemoryShare(share, variable)


def reserve_memory_share(environment: MutableMapping[str, str]) -> None:
    """Set forerun's share for jax, unless the user has set one. It has no effect if jax has already opened the GPU."""
    if not memory_share(environment).variable:
        environment[VARIABLE] = f"{MEMORY_SHARE:.2f}"
