"""Rows of the CSV tables that ship with the package, and of CSV files of the user's, each with its line number."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Row:
    """One line of a table: `cells` by column name, all text."""

    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """The cell as a number; None if it is empty."""
        text = self.text(column)
        return float(text) if text else None

    def integer(self, column: str) -> int | None:
        text = self.text(column)
        return int(text) if text else None


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def shipped(name: str) -> Table:
    """A table of the package, such as `chips.csv`."""
    text = resources.files("forerun.hardware").joinpath("tables", name).read_text("utf-8")
    return parsed(text.splitlines())


def parsed(lines: Iterable[str]) -> Table:
    """A CSV table. Lines that begin with `#` and empty lines are skipped; the first line left names the columns."""
    kept = [
        (number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
    ]
    records = list(_records(kept))
    if not records:
        return Table((), ())
    columns = tuple(cell.strip() for cell in records[0][1])
    # A row that is too long keeps its surplus under "", where a caller can find it.
    return Table(columns, tuple(Row(line, _named(columns, cells)) for line, cells in records[1:]))


def _records(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines:
        yield number, next(csv.reader([line]))


def _named(columns: tuple[str, ...], cells: list[str]) -> dict[str, str]:
    named = dict(zip(columns, cells, strict=False))
    surplus = cells[len(columns) :]
    return named | ({"": ",".join(surplus)} if surplus else {})
