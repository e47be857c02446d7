"""Bad rows and damaged files: how many may be passed over, and what is said when there are more.

What is said depends on the data alone, never on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.data.source.rows import Bad, Place
from forerun.data.tokens.unit import skipped_of, unit_name
from forerun.errors import UserError


@dataclass(frozen=True)
class Limits:
    """`rows` that may be bad: a share if below 1, else a number; `files` that may be damaged."""

    rows: float = 0.0
    files: int = 0

    def check(self, store: Path, units: Sequence[dict[str, Any]], *, whole: bool) -> None:
        """`units` are summaries in order; a share can be told of the `whole` only, a number of any beginning."""
        names = [unit_name(unit["unit"], unit["of"]) for unit in units]
        damaged = dict.fromkeys(file for unit in units for file in unit["bad_files"])
        if len(damaged) > self.files:
            faults = (one for one in skipped_of(store, names) if one["whole_file"])
            raise self._too_many(faults, len(damaged), None, "file", "are damaged", "bad_files", self.files)
        rows, bad = sum(unit["rows"] for unit in units), sum(unit["bad"] for unit in units)
        allowed = self.rows * rows if self.rows < 1 else self.rows
        if bad > allowed and (whole or not 0 < self.rows < 1):
            faults = (one for one in skipped_of(store, names) if not one["whole_file"])
            raise self._too_many(faults, bad, rows, "row", "are bad", "bad_rows", self.rows)

    def _too_many(
        self, faults: Iterable[dict[str, Any]], many: int, of: int | None, word: str, verb: str, key: str, limit: float
    ) -> UserError:
        first = [bad_from(one) for one in islice(faults, 3)]
        if limit == 0:
            return stopped(first[0])
        among = "" if of is None else f" of {of}"
        return UserError(
            f"{many}{among} {word}s {verb}, and data.{key} allows {_number(limit)}",
            why="\n".join([f"{bad.place}: {bad.what}" for bad in first] + ["..."] * (many > 3)),
            fix=f"mend them, or pass over them: data.{key}={many}",
        )


def stopped(bad: Bad) -> UserError:
    """The first bad row ends the build."""
    error = bad.error()
    key = "bad_files" if bad.whole_file else "bad_rows"
    if f"data.{key}" not in error.fix:
        error.fix += f"; to pass over such {key.removeprefix('bad_')}: data.{key}=N"
    return error


def bad_from(one: dict[str, Any]) -> Bad:
    place = Place(one["file"], one["number"], one["word"])
    return Bad(place, one["what"], one["why"], one["fix"], one["whole_file"])


def _number(limit: float) -> str:
    return f"{limit:.3g} of them" if limit < 1 else f"{limit:.0f}"
