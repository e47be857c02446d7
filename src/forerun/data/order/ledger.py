"""The ledger: which examples each step learned from, a line of JSON a step, and the comparison of two of them.

    {"step": 7, "examples": [[0, 512], [0, 90, 2]]}

A step whose batch was left out has learned from none, and says which and why:

    {"step": 8, "examples": [], "skipped": [[0, 17]], "why": "loss nan, gradient norm nan"}

An example is [part, document] or [part, document, piece]. Two runs with the same ledger saw the same data in the same
order, whatever happened to them on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forerun.data.order.rows import Example
from forerun.errors import UserError
from forerun.journal import Journal, Seal


class Ledger(Journal):
    """Appends a line a step. `step` is the first step to come: lines of this step and of later ones are removed."""

    def __init__(
        self,
        file: Path,
        step: int = 0,
        *,
        seals: Sequence[Seal] = (),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(file, last=step - 1, seals=seals, tell=tell, is_entry=_is_entry)

    def write(self, step: int, examples: Iterable[Example], *, skipped: str | None = None) -> None:
        """`skipped` is why the step was not taken, if it was not."""
        said: dict[str, object] = {"step": step, "examples": list(examples)}
        if skipped is not None:
            said = {"step": step, "examples": [], "skipped": said["examples"], "why": skipped}
        self.append(json.dumps(said, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True)
class Difference:
    """The first one: at `step`, example number `place`; None where one of the two has no more."""

    step: int
    place: int
    left: Example | None
    right: Example | None

    def __str__(self) -> str:
        return f"step {self.step}, example {self.place}: {_said(self.left)} and {_said(self.right)}"


def entries(file: Path) -> Iterator[tuple[int, list[Example]]]:
    """(step, examples) of every whole line."""
    for line in _lines(file):
        step, examples = _parsed(line, file)
        assert step is not None
        yield step, examples


def drawn(file: Path) -> Iterator[tuple[int, list[Example], str | None]]:
    """(step, examples of its batch, why it was left out if it was) of every whole line."""
    for line, (step, examples) in zip(_lines(file), entries(file), strict=True):
        said = json.loads(line)
        skipped = [tuple(example) for example in said.get("skipped", ())]
        yield step, examples or skipped, said.get("why")


def compare(left: Path, right: Path) -> Difference | None:
    """The first difference of two ledgers, or None; a line of each is held at a time."""
    for a, b in zip_longest(_lines(left), _lines(right)):
        if a == b:
            continue
        (step, here), (other, there) = _parsed(a, left), _parsed(b, right)
        if step != other:  # one of them lacks the earlier step
            known = [number for number in (step, other) if number is not None]
            first = min(known)
            here, there = (here if step == first else []), (there if other == first else [])
            return Difference(first, 0, here[0] if here else None, there[0] if there else None)
        assert step is not None
        for place, (one, two) in enumerate(zip_longest(here, there)):
            if one != two:
                return Difference(step, place, one, two)
    return None


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def _parsed(line: bytes | None, file: Path) -> tuple[int | None, list[Example]]:
    if line is None:
        return None, []
    try:
        said = json.loads(line)
        return int(said["step"]), [tuple(example) for example in said["examples"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(line, file) from error


def _is_entry(entry: dict[str, Any]) -> bool:
    examples = entry.get("examples")
    return isinstance(examples, list) and all(isinstance(example, list) for example in examples)


def _damaged(line: bytes, file: Path) -> UserError:
    return UserError(
        f"{file}: a line is no entry of a ledger", why=repr(line[:80].decode(errors="replace")), fix=f"remove {file}"
    )


def _said(example: Example | None) -> str:
    return "nothing" if example is None else str(list(example))
