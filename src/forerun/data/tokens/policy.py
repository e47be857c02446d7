"""Limits on bad rows and damaged files, and the errors if there are more.

The errors depend only on the data, not on the order in which workers finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.data.source.rows import BadRow, RowPlace
from forerun.data.storage.folder import StoreFolder
from forerun.data.tokens.unit import read_skipped, unit_name
from forerun.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Limits on what may be skipped. `rows` is a share of bad rows if below 1, else a number. `files` is a number."""

    rows: float = 0.0
    files: int = 0

    def check(self, store: Path | StoreFolder, units: Iterable[dict[str, Any]], *, whole: bool) -> None:
        """Raise UserError if `units` have more bad rows or damaged files than allowed.

        `units` are the summaries of all units (`whole`) or of the first ones. A share is only checked for all units,
        a number also for the first ones.
        """
        rows = bad = 0
        names: list[str] = []  # of units with a record
        damaged: dict[str, None] = {}
        for unit in units:
            rows, bad = rows + unit["rows"], bad + unit["bad"]
            damaged |= dict.fromkeys(unit["bad_files"])
            names += [unit_name(unit["unit"], unit["of"])] if unit["bad"] or unit["bad_files"] else []
        if len(damaged) > self.files:
            faults = (one for one in read_skipped(store, names) if one["whole_file"])
            raise self._too_many(faults, len(damaged), None, "file", "are damaged", "bad_files", self.files)
        allowed = self.rows * rows if self.rows < 1 else self.rows
        if bad > allowed and (whole or not 0 < self.rows < 1):
            faults = (one for one in read_skipped(store, names) if not one["whole_file"])
            raise self._too_many(faults, bad, rows, "row", "are bad", "bad_rows", self.rows)

    def _too_many(
        self, faults: Iterable[dict[str, Any]], many: int, of: int | None, word: str, verb: str, key: str, limit: float
    ) -> UserError:
        """Return the error for too many bad rows or files. With a limit of 0 it is the error of the first one."""
        first = [bad_from(one) for one in islice(faults, 3)]
        if limit == 0:
            return stopped(first[0])
        among = "" if of is None else f" of {of}"
        return UserError(
            "E-DATA-103",
            f"{many}{among} {word}s {verb}, and data.{key} allows {_number(limit)}",
            why="\n".join([f"{bad.place}: {bad.what}" for bad in first] + ["..."] * (many > 3)),
            fix=f"fix them, or skip them: data.{key}={many}",
        )


def stopped(bad: BadRow) -> UserError:
    """Return the error for a bad row that ends the build. Its fix names the key that allows such rows."""
    error = bad.error()
    key = "bad_files" if bad.whole_file else "bad_rows"
    if f"data.{key}" not in error.fix:
        error.fix += f"; to skip such {key.removeprefix('bad_')}: data.{key}=N"
    return error


def bad_from(one: dict[str, Any]) -> BadRow:
    """Return the bad row of a record."""
    place = RowPlace(one["file"], one["number"], one["word"])
    return BadRow(one["code"], one["what"], one["why"], one["fix"], place, one["whole_file"])


def _number(limit: float) -> str:
    return f"{limit:.3g} of them" if limit < 1 else f"{limit:.0f}"
