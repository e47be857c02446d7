"""The dimensions of a matrix multiplication: a `dot`, or a call of cuBLAS, which XLA's GPU compiler uses instead."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction, Shape

# Targets: __cublas$gemm, __cublas$lt$matmul, and with $f8 or $mx for 8-bit operands.
CUBLAS = re.compile(r'custom_call_target="__cublas\$')


@dataclass(frozen=True)
class GemmShape:
    """`batch` products of an m x k and a k x n matrix."""

    batch: int
    m: int
    n: int
    k: int
    operand: str  # type of the wider operand, for example "bf16"
    result: str

    @property
    def flops(self) -> float:
        """FLOPs, two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


def is_cublas_call(x: Instruction) -> bool:
    return x.op == "custom-call" and CUBLAS.search(x.attributes) is not None


def gemm_shape(computation: Computation, x: Instruction) -> GemmShape | None:
    """Return the dimensions of a `dot` or of a call of cuBLAS, or None for other instructions."""
    if x.op != "dot" and not is_cublas_call(x):
        return None
    left, right = computation.operand(x, 0), computation.operand(x, 1)
    if left is None or right is None or not left.shapes or not right.shapes or not x.shapes:
        return None
    lhs, rhs = left.shapes[0], right.shapes[0]
    contracted, batch = _dims(x, "lhs_contracting"), _dims(x, "lhs_batch")
    other_contracted, other_batch = _dims(x, "rhs_contracting"), _dims(x, "rhs_batch")
    return GemmShape(
        batch=math.prod(lhs.dims[d] for d in batch),
        m=_rest(lhs, (*contracted, *batch)),
        n=_rest(rhs, (*other_contracted, *other_batch)),
        k=math.prod(lhs.dims[d] for d in contracted),
        operand=max(lhs, rhs, key=lambda shape: _bits(shape.dtype)).dtype,
        result=x.shapes[0].dtype,
    )


def _rest(shape: Shape, without: tuple[int, ...]) -> int:
    return math.prod(size for number, size in enumerate(shape.dims) if number not in without)


def _dims(x: Instruction, role: str) -> tuple[int, ...]:
    """Return dimension numbers, from the attributes of a `dot` or the configuration of a call."""
    found = re.search(rf'\b{role}_dims=\{{([\d,]*)\}}|"{role}_dimensions":\[([^\]]*)\]', x.attributes)
    return tuple(int(number) for number in re.findall(r"\d+", (found[1] or found[2] or "") if found else ""))


def _bits(dtype: str) -> int:
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 8
