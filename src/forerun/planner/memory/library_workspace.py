"""Workspaces of NVIDIA's libraries: those in the program, and an estimate of those that only a GPU would tell.

cuBLAS workspaces are part of the program. The workspace of cuDNN's attention is not: without a GPU, XLA writes `u8[0]`.
cuDNN's open frontend allocates it for the backward kernel: a sum of query gradients in float32, a sum per row of the
softmax in float32, and with grouped-query attention, key and value gradients of all query heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from forerun.planner.hlo import Instruction, Module

_TARGET = re.compile(r'custom_call_target="(__cu(?:blas|dnn)\$[^"]*)"')
_BYTE_TYPES = ("s8", "u8")
_FLOAT32_BYTES, _BFLOAT16_BYTES = 4, 2


def is_library_call(x: Instruction) -> bool:
    """Return whether an instruction calls cuBLAS or cuDNN."""
    return x.op == "custom-call" and _TARGET.search(x.attributes) is not None


def is_attention_call(x: Instruction) -> bool:
    """Return whether an instruction is an attention kernel: cuDNN's on GPUs, a custom kernel on TPUs."""
    found = _TARGET.search(x.attributes) if x.op == "custom-call" else None
    return x.op == "custom-call" and (found is None or "fmha" in found[1])


def is_workspace(x: Instruction, index: tuple[int, ...]) -> bool:
    """Return whether an element of an instruction's result is a library's workspace: the last one, of bytes."""
    last = len(x.shapes) - 1
    return bool(index) and index[0] == last > 0 and x.shapes[last].dtype in _BYTE_TYPES and is_library_call(x)


def hidden_workspaces(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the name of each attention kernel whose workspace the program lacks, with an estimate of its bytes."""
    for computation in module.computations.values():
        for x in computation.instructions:
            target = _TARGET.search(x.attributes) if x.op == "custom-call" else None
            if target is None or "fmha" not in target[1] or not target[1].endswith("Backward"):
                continue
            if len(x.shapes) >= 4 and is_workspace(x, (len(x.shapes) - 1,)) and not x.shapes[-1].size_bytes:
                yield x.name, backward_workspace_bytes(x.shapes[0].dims, x.shapes[1].dims)


def backward_workspace_bytes(query: tuple[int, ...], key: tuple[int, ...]) -> int:
    """Return the workspace of cuDNN's backward attention kernel, from the shapes of the gradients.

    Args:
        query: Batch, heads, length and size of the heads.
        key: The same of the keys. With grouped-query attention it has fewer heads.
    """
    sums = _FLOAT32_BYTES * (prod(query) + prod(query[:-1]))
    if query[1] == key[1]:
        return sums
    return sums + 2 * _BFLOAT16_BYTES * prod(key) * query[1] // key[1]
