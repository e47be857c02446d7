"""The work of one instruction: for the matrix unit, for the vector unit, and bytes read from and written to HBM.

Only bytes that are really touched count. A fusion that uses one slice of a stacked weight reads only the slice, and
a dynamic-update-slice writes only its update, in place. Bytes that a collective inside a fusion sends do not count:
`transfers` has their cost.

A vector unit has four slots for arithmetic, each for 1,024 elements of 32 bits per cycle. Another unit computes
functions, such as the exponential, for 1,024 elements per cycle. Both work in the same cycles, so the slower one
counts. The costs were counted in dumped code of v5e and v6e. Per 1,024 elements, ten multiplications and additions take
2.7 and 3.4 cycles, an exponential 1.0 and 1.3, and a division 3.6 and 0.8. Moves of elements between lanes are not
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from forerun.planner.hlo import HBM, Computation, Instruction, Module
from forerun.planner.time.matrix_work import MatrixProduct, convolution_product, dot_product
from forerun.planner.time.transfers import is_collective

DEEPEST = 8  # levels of nested fusions that are examined
LAZY = ("pad", "convert", "copy", "transpose", "reshape")  # each element of the result needs one of the operand
SLICES = ("dynamic-slice", "slice", "gather")
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


class InstructionWork:
    """FLOPs and HBM bytes of a module's instructions, including those inside fusions.

    FLOPs are cached by called computation.

    Args:
        module: The program.
        matrix_unit: Rows and columns of a TPU's matrix unit, for `unit_flops`.
        division_ops: Operations of a TPU's vector unit for one division, for `vector_work`.
        eight_bit_speed: How much faster a TPU multiplies operands of 8 bits than bfloat16, for `unit_flops`.
    """

    def __init__(
        self, module: Module, matrix_unit: int = 1, division_ops: float = 1.0, eight_bit_speed: float = 1.0
    ) -> None:
        self.module, self.matrix_unit, self.division_ops = module, matrix_unit, division_ops
        self.eight_bit_speed = eight_bit_speed
        self.is_tpu = matrix_unit > 1
        self.flops_in = lru_cache(None)(self._flops_in)  # one cache per instance, which ends with the instance
        self.unit_flops_in = lru_cache(None)(self._unit_flops_in)
        self.vector_work_in = lru_cache(None)(self._vector_work_in)

    def flops(self, computation: Computation, x: Instruction) -> float:
        """Return the FLOPs of the matrix multiplications in `x`, two per multiply-add."""
        if x.op == "fusion":
            return self.flops_in(x.attribute("calls") or "")
        product = _product(computation, x)
        return product.flops if product else 0.0

    def _flops_in(self, name: str) -> float:
        computation = self.module.computations.get(name)
        return sum(self.flops(computation, x) for x in computation.instructions) if computation else 0.0

    def unit_flops(self, computation: Computation, x: Instruction) -> float:
        """Return the FLOPs of the matrix units, with those that padding to their size wastes."""
        if x.op == "fusion":
            return self.unit_flops_in(x.attribute("calls") or "")
        product = _product(computation, x)
        return product.unit_flops(self.matrix_unit, self.eight_bit_speed) if product else 0.0

    def _unit_flops_in(self, name: str) -> float:
        computation = self.module.computations.get(name)
        return sum(self.unit_flops(computation, x) for x in computation.instructions) if computation else 0.0

    def vector_work(self, computation: Computation, x: Instruction) -> VectorWork:
        """Return the work of a TPU's vector units."""
        if x.op == "fusion":
            return self.vector_work_in(x.attribute("calls") or "")
        return vector_work(computation, x, self.division_ops)

    def _vector_work_in(self, name: str) -> VectorWork:
        found = self.module.computations.get(name)
        parts = (self.vector_work(found, x) for x in found.instructions) if found else ()
        return sum(parts, VectorWork())

    def hbm_bytes(self, computation: Computation, x: Instruction) -> float:
        """Return the bytes that `x` reads from HBM plus those that it writes there."""
        if x.op == "fusion":
            return self._fusion_bytes(computation, x)
        if x.op == "dynamic-update-slice":
            update = computation.operand(x, 1)
            return update.bytes_in(HBM) + (update.size_bytes if x.bytes_in(HBM) else 0.0) if update else 0.0
        if x.op in SLICES:
            source = computation.operand(x, 0)
            return x.bytes_in(HBM) + (x.size_bytes if source and source.bytes_in(HBM) else 0.0)
        operands = (computation.by_name.get(name) for name in x.operands)
        return x.bytes_in(HBM) + sum(operand.bytes_in(HBM) for operand in operands if operand)

    def _fusion_bytes(self, computation: Computation, x: Instruction) -> float:
        inner = self.module.computations[x.attribute("calls") or ""]
        parameters = inner.parameters()
        total = 0.0
        for number, name in enumerate(x.operands):
            operand = computation.by_name.get(name)
            whole = operand.bytes_in(HBM) if operand else 0.0
            total += self._read_bytes(inner, parameters[number], whole) if number in parameters else whole
        return total + self._written_bytes(inner, inner.root, x)

    def _written_bytes(self, inner: Computation, root: Instruction, x: Instruction) -> float:
        """Return the bytes that the fusion `x` writes to HBM. `root` is the root of its contents `inner`."""
        if root.op == "tuple" and len(root.operands) == len(x.shapes):
            parts = zip(x.shapes, root.operands, strict=True)
            return sum(
                min(shape.size_bytes, self._write_bytes(inner, inner.by_name[name]))
                for shape, name in parts
                if shape.space == HBM
            )
        whole = x.bytes_in(HBM)
        return min(whole, self._write_bytes(inner, root)) if whole else 0.0

    def _write_bytes(self, computation: Computation, x: Instruction, depth: int = 0) -> float:
        """Return the bytes that producing `x` writes. An in-place update writes only the update."""
        if x.op == "dynamic-update-slice":
            update = computation.operand(x, 1)
            return update.size_bytes if update else 0.0
        if x.op == "bitcast":
            source = computation.operand(x, 0)
            return self._write_bytes(computation, source, depth) if source else x.size_bytes
        if x.op == "fusion" and depth < DEEPEST:
            inner = self.module.computations[x.attribute("calls") or ""]
            if inner.root.op != "tuple":
                return min(x.size_bytes, self._write_bytes(inner, inner.root, depth + 1))
        return 0.0 if x.op == "parameter" or is_collective(x) else x.size_bytes

    def _read_bytes(self, computation: Computation, x: Instruction, whole: float, depth: int = 0) -> float:
        """Return the bytes of `x` that its users in this computation really read, at most `whole`."""
        total = 0.0
        for user, number in self.module.users.get((computation.name, x.name), ()):
            if user.op in SLICES and number == 0:
                total += user.size_bytes
            elif (user.op == "dynamic-update-slice" and number == 0) or user.op == "tuple" or is_collective(user):
                continue  # updated in place, only grouped, or read by the interconnect: the core reads nothing
            elif user.op in ("bitcast", "get-tuple-element") or self._is_alias(user):
                total += self._read_bytes(computation, user, whole, depth + 1)
            elif user.op in LAZY and self.is_tpu and not user.is_root and depth < DEEPEST:
                # A fusion computes only the elements that are needed, for example a slice of a padded array.
                needed = self._read_bytes(computation, user, user.size_bytes, depth + 1)
                total += whole * needed / user.size_bytes
            elif user.op == "fusion" and depth < DEEPEST:
                inner = self.module.computations[user.attribute("calls") or ""]
                parameter = inner.parameters().get(number)
                if parameter is not None and _is_same_array(inner, parameter):
                    total += self._read_bytes(computation, user, whole, depth + 1)  # the fusion's users read `x`
                else:
                    total += self._read_bytes(inner, parameter, whole, depth + 1) if parameter else whole
            else:
                return whole
            if total >= whole:
                return whole
        return total

    def _is_alias(self, x: Instruction) -> bool:
        """Return whether `x` is a fusion that only renames its operand (tpu7x wraps loop carries in such fusions)."""
        if x.op != "fusion" or "output_to_operand_aliasing" not in x.attributes:
            return False
        inner = self.module.computations[x.attribute("calls") or ""]
        return all(y.op in ("parameter", "copy", "bitcast") for y in inner.instructions)


def _product(computation: Computation, x: Instruction) -> MatrixProduct | None:
    """Return the matrix multiplication that an instruction is, or None."""
    return convolution_product(computation, x) if x.op == "convolution" else dot_product(computation, x)


def _is_same_array(computation: Computation, parameter: Instruction) -> bool:
    """Return whether the computation returns `parameter` unchanged except for its shape."""
    x: Instruction | None = computation.root
    while x is not None and x.op == "bitcast":
        x = computation.operand(x, 0)
    return x is parameter
