"""CSV tables with line numbers: those of the package, and the user's files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Row:
    """One line of a table: its number, and its cells as text by column name."""

    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """Return the cell as text; empty if the column does not exist."""
        return self.cells.get(column, "").strip()

    def number(self, column: str, unit: float = 1.0) -> float | None:
        """Return the cell as a number times `unit`, or None if it is empty."""
        text = self.text(column)
        return float(text) * unit if text else None


@dataclass(frozen=True)
class Table:
    """The columns of the header line, and the rows."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def shipped(name: str) -> Table:
    """Return a table of the package, such as `chips.csv`."""
    text = resources.files("forerun.hardware").joinpath("tables", name).read_text("utf-8")
    return parsed(text.splitlines())


def parsed(lines: Iterable[str]) -> Table:
    """Parse a CSV table. Empty lines and lines that start with `#` are skipped. The first other line is the header."""
    records = [
        (number, next(csv.reader([line])))
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not records:
        return Table((), ())
    columns = tuple(cell.strip() for cell in records[0][1])
    rows = []
    for line, cells in records[1:]:
        surplus = cells[len(columns) :]  # stored under "", so that a caller can reject the row
        rows.append(Row(line, dict(zip(columns, cells, strict=False)) | ({"": ",".join(surplus)} if surplus else {})))
    return Table(columns, tuple(rows))
