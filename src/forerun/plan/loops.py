"""How often a loop runs. The compiler leaves no trip count, so the loop's counter is run through its condition."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from forerun.plan.hlo import Computation, Instruction, Module

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
FARTHEST = 40
MOST_TRIPS = 20_000

Leaf = Callable[[Instruction], int | None]  # the value of a parameter, or of an element of one


class Loops:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.guessed: list[str] = []  # loops whose number of turns depends on data
        self._owners: dict[str, tuple[Computation, Instruction]] = {}  # body or condition -> the while around it
        for computation in module.computations.values():
            for x in computation.instructions:
                if x.op == "while":
                    for role in ("body", "condition"):
                        self._owners[x.attribute(role) or ""] = (computation, x)

    def trips(self, computation: Computation, loop: Instruction) -> int:
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

        for trips in range(MOST_TRIPS):
            goes_on = self._value(condition, condition.root.name, element)
            if value is None or goes_on is None:
                return None
            if not goes_on:
                return trips
            value = self._value(body, body.root.operands[counter], element)
        return None

    def constant(self, computation: Computation, name: str, depth: int = 0) -> int | None:
        """The value of an integer that never changes, followed through tuples into and out of loops."""

        def element(x: Instruction) -> int | None:
            if computation.name not in self._owners or x.index is None:
                return None
            around, loop = self._owners[computation.name]
            return self._carried(around, loop, x.index, depth + 1)

        return self._value(computation, name, element, depth)

    def _carried(self, around: Computation, loop: Instruction, index: int, depth: int) -> int | None:
        """What a loop was given as this element, if it leaves it as it is."""
        start = around.operand(loop, 0)
        if start is None or start.op != "tuple" or not _is_unchanged(self._body(loop), index):
            return None
        return self.constant(around, start.operands[index], depth)

    def _value(self, computation: Computation, name: str, leaf: Leaf, depth: int = 0) -> int | None:
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
            return self._inside(computation, x, leaf, depth + 1)
        if x.op in ARITHMETIC or x.op == "compare":
            return self._of_two(computation, x, leaf, depth + 1)
        return None

    def _of_two(self, computation: Computation, x: Instruction, leaf: Leaf, depth: int) -> int | None:
        left, right = (self._value(computation, name, leaf, depth) for name in x.operands)
        if left is None or right is None:
            return None
        if x.op == "compare":
            return DIRECTIONS[x.attribute("direction") or "LT"](left, right)
        return ARITHMETIC[x.op](left, right)

    def _inside(self, computation: Computation, x: Instruction, leaf: Leaf, depth: int) -> int | None:
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
    """Whether it is an element of what the computation was given."""
    source = computation.operand(x, 0) if x.op == "get-tuple-element" else None
    return source is not None and source.op == "parameter"


def _is_unchanged(body: Computation, index: int) -> bool:
    if body.root.op != "tuple":
        return False
    x = body.by_name.get(body.root.operands[index])
    while x is not None and x.op in PASSED_ON:
        x = body.operand(x, 0)
    return x is not None and x.index == index and _is_element(body, x)
