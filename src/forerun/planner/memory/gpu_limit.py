"""The memory limit of GPUs, as a sentence. The GPU compiler has no limit of its own: it never rejects a program."""

from __future__ import annotations

from forerun.hardware.gpu_memory import MemoryShare, memory_share
from forerun.hardware.slices import Slice
from forerun.units import Bytes


def limit_text(target: Slice, share: MemoryShare | None = None) -> str | None:
    """Return how the memory limit of a GPU machine is computed, or None for a TPU slice: its compiler has a limit.

    Args:
        target: The slice or GPU machine.
        share: The share of the memory for arrays; by default the one of the environment.
    """
    specs, share = target.chip.gpu, share or memory_share()
    if specs is None:
        return None
    limit = Bytes(int(specs.memory_bytes * share.share))
    source = f"set by {share.variable}" if share.variable else "which train reserves"
    return f"{target.chip.name}: limit {limit} = {Bytes(specs.memory_bytes)} of memory x {share.share:.2f}, {source}"
