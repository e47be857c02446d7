"""The price of a chip per hour, and its row in a table."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.hardware.chips import canonical_name, chip_named
from forerun.hardware.rows import Row

ON_DEMAND, SPOT = "usd_per_chip_hour_on_demand", "usd_per_chip_hour_spot"
KINDS = ("", "single", "pod")
GOOGLE_CLOUD = "gcp"


@dataclass(frozen=True)
class Price:
    """USD per chip-hour of one provider, in one zone of Google Cloud or in the cheapest region of another provider.

    For v2 and v3, `kind` is `single` for slices with one host and `pod` for larger ones. Otherwise it is empty.
    """

    generation: str
    zone: str  # empty: the cheapest region of the provider
    usd_per_chip_hour_on_demand: float
    usd_per_chip_hour_spot: float | None
    date: str
    source: str
    kind: str = ""
    provider: str = GOOGLE_CLOUD
    chips: int | None = None  # the price is only for machines with this number of chips; None: any number
    machine_type: str = ""  # the provider's name of the machine, if the price is for one

    @property
    def place(self) -> str:
        """The zone, or the provider if the price is not for one zone."""
        return self.zone or self.provider


def price_in(row: Row, file: str) -> Price:
    """Return the price in a row; raise an error that names the invalid cell."""
    generation = canonical_name(row.text("generation"))
    try:
        generation = chip_named(generation).name
    except UserError as error:
        raise _wrong(file, row, "generation", error.why) from error
    provider = row.text("provider").lower() or GOOGLE_CLOUD
    if not row.text("zone") and provider == GOOGLE_CLOUD and not row.text("chips"):
        raise _wrong(file, row, "zone", "a zone is needed, such as us-central1-a")
    if row.text("kind") not in KINDS:
        raise _wrong(file, row, "kind", "it is single, pod or empty")
    if "" in row.cells:
        raise _wrong(file, row, "source", "the line has more cells than the header; quote text that has a comma")
    on_demand = _amount(row, ON_DEMAND, file)
    if on_demand is None:
        raise _wrong(file, row, ON_DEMAND, "a price in USD is needed; omit zones without a price")
    try:
        datetime.date.fromisoformat(row.text("date"))
    except ValueError as error:
        raise _wrong(file, row, "date", "every price needs its date: write it as 2026-08-21") from error
    return Price(
        generation,
        row.text("zone"),
        on_demand,
        _amount(row, SPOT, file),
        row.text("date"),
        row.text("source") or file,
        row.text("kind"),
        provider,
        _chips(row, file),
        row.text("machine_type"),
    )


def _chips(row: Row, file: str) -> int | None:
    """Return the number of chips that the price is for, or None if it is for any number."""
    text = row.text("chips")
    if text and not (text.isdigit() and int(text) > 0):
        raise _wrong(file, row, "chips", "it is the number of chips of the machine, or empty for any number")
    return int(text) if text else None


def _amount(row: Row, column: str, file: str) -> float | None:
    """Return the positive number in a cell, or None if it is empty."""
    try:
        value = row.number(column)
    except ValueError as error:
        raise _wrong(file, row, column, "it is not a number: write 2.70, without a currency sign") from error
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise _wrong(file, row, column, "a price is a positive number")
    return value


def _wrong(file: str, row: Row, column: str, why: str) -> UserError:
    return UserError(
        "E-HARDWARE-015",
        f"{file} line {row.line}, column {column}: {row.text(column)!r} is not usable",
        why=why,
        fix=f"edit line {row.line} of {file}",
    )
