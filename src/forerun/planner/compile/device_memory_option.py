"""The memory limit that the GPU compiler works with, as in `train`.

With a GPU, jaxlib passes the limit of its allocator to the compiler, in a field of the compile options that Python
cannot set (`PyClient::CompileAndLoadIfrtProgram` in jaxlib/py_client.cc). XLA computes values again instead of keeping
them if the program is near this limit. Without the field, XLA would use 80 % of the device's memory, and the planned
program could differ from the one that runs. So the field is added to the serialized options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Numbers of the fields in xla/pjrt/proto/compile_options.proto.
BUILD_OPTIONS, DEVICE_MEMORY_SIZE = 3, 15
_VARINT, _MESSAGE = 0, 2


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[None]:
    """Compile with `limit_bytes` as the memory of the device, as jaxlib does with the limit of its allocator.

    If a version of jax lacks the internal function, XLA uses its own limit. tests/aot/test_gpu_plan.py notices that.
    """
    from jax._src import compiler
    from jaxlib import _jax

    own: Any = getattr(compiler, "get_compile_options", None)
    if own is None:
        yield
        return

    def with_limit(*args: Any, **values: Any) -> Any:
        options = own(*args, **values)
        # Protocol buffers merge messages that follow each other.
        return _jax.CompileOptions.ParseFromString(options.SerializeAsString() + memory_field(limit_bytes))

    compiler.get_compile_options = with_limit
    try:
        yield
    finally:
        compiler.get_compile_options = own


def memory_field(limit_bytes: int) -> bytes:
    """Return serialized compile options with only the memory of the device."""
    inner = _varint(DEVICE_MEMORY_SIZE << 3 | _VARINT) + _varint(limit_bytes)
    return _varint(BUILD_OPTIONS << 3 | _MESSAGE) + _varint(len(inner)) + inner


def _varint(value: int) -> bytes:
    """Return a number in the format of protocol buffers: 7 bits per byte, lowest first."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
