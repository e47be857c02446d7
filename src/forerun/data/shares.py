"""The share of the data that is held out for validation, compared with the share that the job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import UserError

FAR = 2.0  # a share this many times larger or smaller than the job's is reported


@dataclass(frozen=True)
class HeldOut:
    """The data that is held out for validation: `held` of `count` items, which have `share` of the tokens."""

    wanted: float  # the share that the job asks for
    by: str  # what is counted: documents, rows or pairs
    held: int
    count: int
    share: float

    @property
    def is_far(self) -> bool:
        """Whether the share is far from the one that the job asks for."""
        return not self.wanted / FAR <= self.share <= self.wanted * FAR

    def __str__(self) -> str:
        """Return for example `1 of 3 documents, 35.2 % of the tokens; the job asks for 2 %`."""
        return f"{self.number}, {self.asked}"

    @property
    def number(self) -> str:
        return f"{self.held:,} of {self.count:,} {self.by}"

    @property
    def asked(self) -> str:
        return f"{100 * self.share:.3g} % of the tokens; the job asks for {100 * self.wanted:.3g} %"

    @property
    def counted(self) -> str:
        return f"{self.number}, {100 * self.share:.3g} % of the tokens"

    @property
    def warning(self) -> str:
        """A warning with both shares, the cause of the difference, and the key that gives an exact share."""
        what = f"data.validation={self.wanted:g} asks for {100 * self.wanted:.3g} %, but {self.counted} are held out"
        if self.by == "rows":
            return f"{what}: there are too few rows for that share; use more data or a shorter sequence"
        why = f"complete {self.by} are held out by their hash, and there are too few for an exact share"
        exact = "" if self.by == "pairs" else "; data.validation_by=rows holds out an exact share of the packed rows"
        return f"{what}: {why}{exact}"


def require_held_out(parts: Sequence[HeldOut], rows: int) -> None:
    """Raise UserError unless something of the parts is held out. `rows` is the number of packed rows of all parts."""
    if any(part.held for part in parts):
        return
    first, count = parts[0], sum(part.count for part in parts)
    more = "use more data, or data.validation=0 for no validation"
    by_rows = first.by == "documents" and rows > 1
    raise UserError(
        "E-DATA-226",
        f"data.validation={first.wanted:g} holds out nothing",
        why=f"it chooses each of the {count:,} {first.by} by its hash, and chose none"
        if first.by != "rows"
        else f"the data has {count:,} packed row{'s' if count > 1 else ''}, and at least one remains for training",
        fix=f"data.validation_by=rows holds out an exact share of the {rows:,} packed rows; or {more}"
        if by_rows
        else more,
    )
