"""The ledger: the examples that each step was trained on, as one line of JSON per step.

    {"step": 7, "examples": [[0, 512], [0, 90, 2]]}

A step whose batch was skipped was trained on no examples. Its line names the skipped examples and the reason:

    {"step": 8, "examples": [], "skipped": [[0, 17]], "why": "loss nan, gradient norm nan"}

An example is [part, document] or [part, document, piece]. Two runs with the same ledger were trained on the same data
in the same order, even if one of them was interrupted and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.data.order.rows import Example
from forerun.errors import UserError
from forerun.journal import Journal, Seal
from forerun.reporter import SILENT, Reporter


class Ledger(Journal):
    """A journal with one line per step.

    Args:
      step: the next step of the run. Opening the file removes the lines of this step and of later ones.
    """

    def __init__(
        self,
        file: Path,
        step: int = 0,
        *,
        seals: Sequence[Seal] = (),
        reporter: Reporter = SILENT,
    ) -> None:
        super().__init__(file, last=step - 1, seals=seals, reporter=reporter, is_entry=_is_entry)

    def write(self, step: int, examples: Iterable[Example], *, skipped: str | None = None) -> None:
        """Append the line of a step. `skipped` is the reason if its batch was skipped, else None."""
        entry: dict[str, object] = {"step": step, "examples": list(examples)}
        if skipped is not None:
            entry = {"step": step, "examples": [], "skipped": entry["examples"], "why": skipped}
        self.append(json.dumps(entry, separators=(",", ":")).encode() + b"\n")


def entries(file: Path) -> Iterator[tuple[int, list[Example]]]:
    """Yield the step and the examples of each complete line. They are empty if the batch was skipped."""
    for step, examples, skipped in drawn(file):
        yield step, [] if skipped is not None else examples


def drawn(file: Path) -> Iterator[tuple[int, list[Example], str | None]]:
    """Yield the step, the examples of its batch, and the reason if it was skipped (else None), line by line.

    The last line may be incomplete, because the run writes it or was killed. It is omitted.
    """
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
                examples = entry["examples"] or entry.get("skipped", ())
                step, examples = int(entry["step"]), [tuple(example) for example in examples]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    "E-DATA-014",
                    f"{file}: a line is not an entry of a ledger",
                    why=repr(line[:80].decode(errors="replace")),
                    fix=f"remove {file}",
                ) from error
            yield step, examples, entry.get("why")


def _is_entry(entry: dict[str, Any]) -> bool:
    examples = entry.get("examples")
    return isinstance(examples, list) and all(isinstance(example, list) for example in examples)
