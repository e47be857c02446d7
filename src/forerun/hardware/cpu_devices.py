"""The CPU as a device of jax, without importing jax where its only property is already known."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from forerun.hardware.devices import ThisMachine


@dataclass(frozen=True)
class NamedDevice:
    """A device of which only the name is known."""

    device_kind: str


@dataclass(frozen=True)
class CpuWithoutJax(ThisMachine):
    """This machine, whose CPU is one device as long as no setting of jax or XLA can change that."""

    def devices(self, platform: str) -> tuple[Any, ...]:
        """Return the platform's devices. Imports jax except for a CPU with default settings."""
        settings = {name for name in self.environment if name.startswith("JAX_")} - {"JAX_PLATFORMS"}
        if platform != "cpu" or settings or self.environment.get("XLA_FLAGS") or "jax" in sys.modules:
            return super().devices(platform)
        return (NamedDevice("cpu"),)
