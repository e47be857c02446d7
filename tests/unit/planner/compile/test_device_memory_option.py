"""The field of the compile options that jaxlib sets with a GPU: jaxlib's own parser is the oracle."""

from __future__ import annotations

import pytest
from jax._src import compiler
from jaxlib import _jax

from forerun.planner.compile.worker import limited_memory, memory_field


@pytest.mark.parametrize("size", [1, 127, 128, 76_441_616_056])
def test_jaxlib_reads_and_writes_the_field(size: int) -> None:
    plain = _jax.CompileOptions().SerializeAsString()
    kept = _jax.CompileOptions.ParseFromString(plain + memory_field(size)).SerializeAsString()
    assert len(kept) > len(plain)
    assert memory_field(size)[2:] in kept, "the tag of the field and its number"


def test_other_options_stay() -> None:
    before = compiler.get_compile_options
    values = {"num_replicas": 1, "num_partitions": 1, "env_options_overrides": {"xla_gpu_enable_triton_gemm": False}}
    with limited_memory(1234567):
        found = compiler.get_compile_options(**values)
    assert compiler.get_compile_options is before
    expected = before(**values)
    assert found.env_option_overrides == expected.env_option_overrides
    assert found.executable_build_options.use_spmd_partitioning
    assert memory_field(1234567)[2:] in found.SerializeAsString()
    assert memory_field(1234567)[2:] not in expected.SerializeAsString()
