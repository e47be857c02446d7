"""Sequences that are split over eight chips, in the program that the TPU compiler scheduled."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

import pytest

from forerun.config.schema import Job
from forerun.planner.hlo import parse
from forerun.planner.time.splash_cost import kernel_shape

pytestmark = pytest.mark.aot

S, CHIPS, HEAD = 16_384, 8, 128
JOB = {
    "model": {"layers": 1, "embed": 256, "heads": 2, "kv_heads": 1, "head_dim": HEAD, "mlp": 512, "vocab": 1024},
    "data": "nothing",
    "sequence": S,
    "batch": 1,
    "steps": 10,
    "loss_chunk": 256,
    "mesh": {"fsdp": 1, "context": CHIPS},
}


def test_split_sequences_gather_keys_and_have_no_scores(scheduled_program: Callable[[Job, str], str]) -> None:
    text = scheduled_program(Job.model_validate(JOB), "v5e-8")
    module = parse(text)
    kernels = {}
    for computation in module.computations.values():
        for x in computation.instructions:
            if (shape := kernel_shape(computation, x)) is not None:
                kernels[shape.kind] = shape
    assert set(kernels) == {"forward", "dq", "dkv"}
    for shape in kernels.values():
        assert (shape.sequence, shape.keys, shape.head, shape.programs) == (S // CHIPS, S, HEAD, 2)
        rows, columns = S // CHIPS // shape.block, S // shape.block
        assert shape.table == (rows, columns)
        assert shape.computed == rows * (columns + 1) / 2

    gathered = [size for size in _sizes_of(text, "all-gather") if size == S * HEAD]
    assert len(gathered) >= 2, "keys and values of the complete sequence"
    largest = max(prod(map(int, dims.split(","))) for dims in re.findall(r"\b(?:bf16|f32|s32|pred)\[([\d,]+)\]", text))
    assert largest < (S // CHIPS) * S / 4, "no scores, not even those of one device's queries"


def _sizes_of(text: str, operation: str) -> list[int]:
    """Return the numbers of elements of all arrays that are results of an operation."""
    lines = [line for line in text.splitlines() if re.search(rf" {operation}(-start)?\(", line)]
    arrays = [dims for line in lines for dims in re.findall(r"bf16\[([\d,]+)\]", line.split(f" {operation}")[0])]
    return [prod(map(int, dims.split(","))) for dims in arrays]
