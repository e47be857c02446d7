"""The share of a GPU's memory that jax uses for arrays. `plan` and `train` use the same one.

jax's allocator is limited to this share of the device's memory, whether it reserves it at the start or not. jaxlib also
gives the limit to the compiler, which computes values again instead of keeping them if the program does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from forerun.errors import UserError

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
