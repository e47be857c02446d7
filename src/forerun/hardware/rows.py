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

    def number(self, column: str) -> float | None:
        """Return the cell as a number, or None if it is empty."""
        text = self.text(column)
        return float(text) if text else None

    def integer(self, column: str) -> int | None:
        """Return the cell as an integer, or None if it is empty."""
        text = self.text(column)
        return int(text) if text else None


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
    kept = [
        (number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
    ]
    records = [(number, next(csv.reader([line]))) for number, line in kept]
    if not records:
        return Table((), ())
    columns = tuple(cell.strip() for cell in records[0][1])
    # Surplus cells of a row are stored under "", so that a caller can reject the row.
    return Table(columns, tuple(Row(line, _named(columns, cells)) for line, cells in records[1:]))


def _named(columns: tuple[str, ...], cells: list[str]) -> dict[str, str]:
    named = dict(zip(columns, cells, strict=False))
    surplus = cells[len(columns) :]
    return named | ({"": ",".join(surplus)} if surplus else {})
