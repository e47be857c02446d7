"""The sentence about the memory limit: its numbers, and where the share comes from."""

from __future__ import annotations

from forerun.hardware.gpu_memory import MemoryShare
from forerun.hardware.rows import shipped
from forerun.hardware.slices import slice_named
from forerun.planner.memory.gpu_limit import limit_text

MEMORY_GIB = float(next(row.text("memory_gib") for row in shipped("gpus.csv").rows if row.text("name") == "4090"))


def test_limit_of_a_gpu() -> None:
    found = limit_text(slice_named("4090-1"), MemoryShare(0.9))
    assert found is not None
    assert f"{0.9 * MEMORY_GIB:.2f} GiB = {MEMORY_GIB:.2f} GiB of memory x 0.90" in found
    assert "train" in found


def test_the_user_s_share_is_named() -> None:
    found = limit_text(slice_named("4090-8"), MemoryShare(0.5, "XLA_CLIENT_MEM_FRACTION"))
    assert found is not None
    assert f"{0.5 * MEMORY_GIB:.2f} GiB" in found
    assert "XLA_CLIENT_MEM_FRACTION" in found


def test_the_compiler_of_tpus_has_its_own_limit() -> None:
    assert limit_text(slice_named("v5e-8")) is None
