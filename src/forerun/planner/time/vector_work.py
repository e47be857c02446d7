"""The work of the vector units: elementwise operations and reductions.

One unit has four slots for arithmetic, each for 1,024 elements of 32 bits per cycle. Another one computes functions,
such as the exponential, for 1,024 elements per cycle. Both work in the same cycles, so the slower one counts.

The costs were counted in dumped code of v5e and v6e. Per 1,024 elements, ten multiplications and additions take 2.7 and
3.4 cycles, an exponential 1.0 and 1.3, and a division 3.6 and 0.8. Moves of elements between lanes are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction

LANES_PER_CYCLE = 4 * 1024  # per core
FUNCTION_OPS = 4.0  # arithmetic operations that take as long as one function
FUNCTIONS = {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power", "erf"}
FUNCTIONS |= {"sine", "cosine", "tan", "atan2", "cbrt"}
# Before v6e, a division, a root or a reciprocal root is a sequence of corrections.
DIVISIONS = {"divide", "sqrt", "rsqrt", "remainder"}
SIMPLE = {"add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "sign", "compare", "select", "clamp"}
SIMPLE |= {"and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic", "convert"}
SIMPLE |= {"floor", "ceil", "round-nearest-even", "round-nearest-afz", "is-finite", "popcnt", "count-leading-zeros"}


@dataclass(frozen=True)
class VectorWork:
    """Operations of the two vector units, each for one element."""

    arithmetic: float = 0.0
    functions: float = 0.0

    def __add__(self, other: VectorWork) -> VectorWork:
        return VectorWork(self.arithmetic + other.arithmetic, self.functions + other.functions)

    @property
    def operations(self) -> float:
        """Arithmetic operations that take as long as this work."""
        return max(self.arithmetic, FUNCTION_OPS * self.functions)


def vector_work(computation: Computation, x: Instruction, division_ops: float) -> VectorWork:
    """Return the work of the vector units for one instruction that is not a fusion.

    Args:
        computation: The computation that has the instruction.
        x: The instruction.
        division_ops: Arithmetic operations for one division or root.
    """
    if x.op in ("reduce", "reduce-precision"):
        source = computation.operand(x, 0)
        return VectorWork(_elements(source)) if source else VectorWork()
    if x.op in SIMPLE:
        return VectorWork(_elements(x))
    if x.op in FUNCTIONS:
        return VectorWork(_elements(x), _elements(x))  # the argument is scaled before
    if x.op in DIVISIONS:
        return VectorWork(division_ops * _elements(x), _elements(x))
    return VectorWork()


def _elements(x: Instruction) -> float:
    return float(math.prod(x.shapes[0].dims)) if x.shapes else 0.0
