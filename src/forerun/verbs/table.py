"""A table of values by column, for metrics and plans."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_SHOWN_ROWS = 10


class Table:
    """Rows with named columns, such as the metrics of a run.

    A column is a list: `table["loss"]`. Iterating gives the rows as dictionaries. `to_pandas` converts the table if
    pandas is installed. Notebooks show the first and the last rows.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in the order in which they first occur."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, column: str) -> list[Any]:
        """Return the values of a column. A row without the column has None."""
        if column not in self._columns:
            raise KeyError(f"{column!r}; the columns are {', '.join(self._columns) or 'none'}")
        return [row.get(column) for row in self._rows]

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`. Raises ImportError if pandas is not installed."""
        import pandas  # optional: forerun does not depend on it

        return pandas.DataFrame(self._rows, columns=self._columns)

    def __repr__(self) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells in self._aligned())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self._columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_text(row.get(name)))}</td>" for name in self._columns) + "</tr>"
            for row in _shortened(self._rows)
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div><p>{len(self)} rows</p>'

    def _aligned(self) -> list[list[str]]:
        rows = [self._columns, *([_text(row.get(name)) for name in self._columns] for row in _shortened(self._rows))]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self._columns))]
        return [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]


def _shortened(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the first and the last rows of a long table."""
    if len(rows) <= _SHOWN_ROWS:
        return rows
    half = _SHOWN_ROWS // 2
    return [*rows[:half], dict.fromkeys(rows[0], "…"), *rows[-half:]]


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.1f}" if abs(value) >= 1e6 else f"{value:.6g}"
