"""Trip counts of loops.

The compiler often omits the trip count. It is then computed here: the loop's counter is evaluated from its start value
until the loop's condition is false.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from forerun.planner.hlo import Computation, Instruction, Module

# Operations whose value is the value of their operand.
PASSED_ON = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier")
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
}
DIRECTIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
ROUNDS = "/expert_rounds/while"  # in the metadata of a loop over the rounds of experts
FARTHEST = 40  # instructions that an evaluation follows
MAX_TRIPS = 20_000

# Returns the value of a parameter, or of an element of one; None if it is unknown.
Leaf = Callable[[Instruction], int | None]


class Loops:
    """The `while` loops of a module and their trip counts."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.guessed: list[str] = []  # loops whose trip count could not be computed, for example if it depends on data
        self._owners: dict[str, tuple[Computation, Instruction]] = {}  # body or condition -> the while around it
        for computation in module.computations.values():
            for x in computation.instructions:
                if x.op == "while":
                    for role in ("body", "condition"):
                        self._owners[x.attribute(role) or ""] = (computation, x)

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """Return the trip count of `loop`, which is an instruction of `computation`.

        If it cannot be computed, the loop is added to `guessed` and the largest constant of its condition is returned.
        Rounds of experts depend on the router. With balanced experts there is one, see `forerun.nn.routing`.
        """
        if ROUNDS in loop.attributes:
            return 1
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = self.module.computations[loop.attribute("condition") or ""]
        body = self._body(loop)
        counters = {x.index for x in condition.instructions if _is_element(condition, x)}
        changing = [index for index in counters if index is not None and not _is_unchanged(body, index)]
        if len(changing) == 1:
            trips = self._counted(computation, loop, condition, changing[0])
            if trips is not None:
                return trips
        self.guessed.append(loop.name)
        numbers = [int(x.literal) for x in condition.instructions if x.op == "constant" and x.literal.isdigit()]
        return max(numbers, default=1)

    def _counted(self, computation: Computation, loop: Instruction, condition: Computation, counter: int) -> int | None:
        """Return the trip count by evaluating the counter, element `counter` of the loop's state; None if unknown."""
        body = self._body(loop)
        start = computation.operand(loop, 0)
        if start is None or start.op != "tuple" or body.root.op != "tuple":
            return None
        value = self.constant(computation, start.operands[counter])

        def element(x: Instruction) -> int | None:
            if x.index == counter:
                return value
            fixed = x.index is not None and _is_unchanged(body, x.index)
            return self.constant(computation, start.operands[x.index or 0]) if fixed else None

        for trips in range(MAX_TRIPS):
            continues = self._value(condition, condition.root.name, element)
            if value is None or continues is None:
                return None
            if not continues:
                return trips
            value = self._value(body, body.root.operands[counter], element)
        return None

    def constant(self, computation: Computation, name: str, depth: int = 0) -> int | None:
        """Return the value of an integer that never changes, or None.

        The value is followed through tuples into and out of loops.
        """

        def element(x: Instruction) -> int | None:
            if computation.name not in self._owners or x.index is None:
                return None
            around, loop = self._owners[computation.name]
            return self._carried(around, loop, x.index, depth + 1)

        return self._value(computation, name, element, depth)

    def _carried(self, around: Computation, loop: Instruction, index: int, depth: int) -> int | None:
        """Return the start value of element `index` of the loop's state if the body does not change it, else None."""
        start = around.operand(loop, 0)
        if start is None or start.op != "tuple" or not _is_unchanged(self._body(loop), index):
            return None
        return self.constant(around, start.operands[index], depth)

    def _value(self, computation: Computation, name: str, leaf: Leaf, depth: int = 0) -> int | None:
        """Return the integer value of an instruction, or None if it is unknown. `leaf` gives values of parameters."""
        x = computation.by_name.get(name)
        if x is None or depth > FARTHEST:
            return None
        if x.op == "constant":
            return _integer(x.literal)
        if x.op == "parameter" or _is_element(computation, x):
            return leaf(x)
        if x.op == "get-tuple-element" and x.index is not None:
            source = computation.operand(x, 0)
            if source is not None and source.op == "tuple":
                return self._value(computation, source.operands[x.index], leaf, depth + 1)
            is_loop = source is not None and source.op == "while"
            return self._carried(computation, source, x.index, depth + 1) if source and is_loop else None
        if x.op in PASSED_ON:
            return self._value(computation, x.operands[0], leaf, depth + 1)
        if x.op in ("fusion", "call"):
            return self._called_value(computation, x, leaf, depth + 1)
        if x.op in ARITHMETIC or x.op == "compare":
            return self._binary_value(computation, x, leaf, depth + 1)
        return None

    def _binary_value(self, computation: Computation, x: Instruction, leaf: Leaf, depth: int) -> int | None:
        left, right = (self._value(computation, name, leaf, depth) for name in x.operands)
        if left is None or right is None:
            return None
        if x.op == "compare":
            return DIRECTIONS[x.attribute("direction") or "LT"](left, right)
        return ARITHMETIC[x.op](left, right)

    def _called_value(self, computation: Computation, x: Instruction, leaf: Leaf, depth: int) -> int | None:
        """Return the value of a fusion or call: evaluate its contents with the values of its operands."""
        inner = self.module.computations.get(x.attribute("calls") or x.attribute("to_apply") or "")
        if inner is None or len(x.shapes) != 1:
            return None

        def argument(parameter: Instruction) -> int | None:
            if parameter.op != "parameter":
                return None
            return self._value(computation, x.operands[int(parameter.literal)], leaf, depth)

        return self._value(inner, inner.root.name, argument, depth)

    def _body(self, loop: Instruction) -> Computation:
        return self.module.computations[loop.attribute("body") or ""]


def _integer(literal: str) -> int | None:
    if literal in ("true", "false"):
        return int(literal == "true")
    return int(literal) if literal.lstrip("-").isdigit() else None


def _is_element(computation: Computation, x: Instruction) -> bool:
    """Return whether `x` is an element of a parameter of the computation."""
    source = computation.operand(x, 0) if x.op == "get-tuple-element" else None
    return source is not None and source.op == "parameter"


def _is_unchanged(body: Computation, index: int) -> bool:
    """Return whether a loop's body returns element `index` of its state as it received it."""
    if body.root.op != "tuple":
        return False
    x = body.by_name.get(body.root.operands[index])
    while x is not None and x.op in PASSED_ON:
        x = body.operand(x, 0)
    return x is not None and x.index == index and _is_element(body, x)
