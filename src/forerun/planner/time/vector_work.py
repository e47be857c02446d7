"""The work of the vector unit: elementwise operations and reductions.

The unit has four slots for arithmetic, each for 1,024 elements of 32 bits per cycle. A cost is in such operations per
element. The costs were counted in dumped code of v5e and v6e: ten multiplications and additions take 2.7 and 3.4 cycles
per 1,024 elements, an exponential 1.0 and 1.3, and a division 3.6 and 0.8. Moves of elements between lanes are not
counted.
"""

from __future__ import annotations

import math

from forerun.planner.hlo import Computation, Instruction

LANES_PER_CYCLE = 4 * 1024  # per core
# The unit for transcendental functions takes 1,024 elements per cycle, the time of four other operations.
FUNCTION_OPS = 4.0
FUNCTIONS = {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power", "erf"}
FUNCTIONS |= {"sine", "cosine", "tan", "atan2", "cbrt"}
# Before v6e, a division, a root or a reciprocal root is a sequence of corrections.
DIVISIONS = {"divide", "sqrt", "rsqrt", "remainder"}
SIMPLE = {"add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "sign", "compare", "select", "clamp"}
SIMPLE |= {"and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic", "convert"}
SIMPLE |= {"floor", "ceil", "round-nearest-even", "round-nearest-afz", "is-finite", "popcnt", "count-leading-zeros"}


def vector_ops(computation: Computation, x: Instruction, division_ops: float) -> float:
    """Return the operations of the vector unit for one instruction that is not a fusion."""
    if x.op in ("reduce", "reduce-precision"):
        source = computation.operand(x, 0)
        return _elements(source) if source else 0.0
    if x.op in SIMPLE:
        return _elements(x)
    if x.op in FUNCTIONS:
        return FUNCTION_OPS * _elements(x)
    return division_ops * _elements(x) if x.op in DIVISIONS else 0.0


def _elements(x: Instruction) -> float:
    return float(math.prod(x.shapes[0].dims)) if x.shapes else 0.0
