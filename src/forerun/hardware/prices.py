"""Prices of chips per hour and zone, from the dated table `tables/prices.csv` and the user's price file."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.errors import UserError, did_you_mean
from forerun.files import read_regular
from forerun.hardware.chips import canonical_name, chip_named
from forerun.hardware.rows import Row, Table, parsed, shipped
from forerun.units import MIB

ON_DEMAND, SPOT = "usd_per_chip_hour_on_demand", "usd_per_chip_hour_spot"
COLUMNS = ("generation", "zone", "kind", ON_DEMAND, SPOT, "date", "source")
REQUIRED = ("generation", "zone", ON_DEMAND, "date")
KINDS = ("", "single", "pod")
MAX_PRICES_BYTES = 8 * MIB


@dataclass(frozen=True)
class Price:
    """USD per chip-hour in one zone.

    For v2 and v3, `kind` is `single` for slices with one host and `pod` for larger ones. Otherwise it is empty.
    """

    generation: str
    zone: str
    usd_per_chip_hour_on_demand: float
    usd_per_chip_hour_spot: float | None
    date: str
    source: str
    kind: str = ""


def prices(override_file: str | None = None) -> list[Price]:
    """Return the shipped prices, with those of the user's file added.

    A row of the user's file replaces shipped rows of the same generation, zone and kind. Without a kind, it replaces
    all kinds.
    """
    if override_file is None:
        return list(_shipped())
    own = _override(Path(override_file))
    taken = {(price.generation, price.zone, price.kind) for price in own}
    kept = [
        price
        for price in _shipped()
        if (price.generation, price.zone, price.kind) not in taken and (price.generation, price.zone, "") not in taken
    ]
    return kept + own


def cheapest(
    chip_name: str, zone: str | None = None, spot: bool = False, hosts: int = 1, override_file: str | None = None
) -> Price | None:
    """Return the lowest price of a chip, or None if no price is known.

    Args:
        chip_name: The chip.
        zone: One zone; None is all zones.
        spot: Compare spot prices instead of on-demand prices.
        hosts: Hosts of the slice. It matters only for v2 and v3, where more than one host costs the pod price.
        override_file: The user's price file.

    Raises:
        UserError: The zone has no price of any chip, or the chip or the file is invalid.
    """
    known = prices(override_file)
    generation = chip_named(chip_name).name
    if zone is not None:
        check_zone(zone, known)
    fitting = [
        price
        for price in known
        if price.generation == generation
        and zone in (None, price.zone)
        and price.kind in ("", "pod" if hosts > 1 else "single")
        and not (spot and price.usd_per_chip_hour_spot is None)
    ]
    # With equal on-demand prices, prefer the zone with the lower spot price.
    return min(fitting, key=lambda price: (_usd(price, spot), price.usd_per_chip_hour_spot or math.inf), default=None)


def check_zone(zone: str, known: list[Price]) -> None:
    """Raise an error if no price is known in the zone."""
    zones = sorted({price.zone for price in known})
    if zone in zones:
        return
    near = did_you_mean(zone, zones)
    raise UserError(
        "E-HARDWARE-011",
        f"no price is known in zone {zone!r}" + (f": did you mean {near}?" if near else ""),
        why=f"the price table has {len(zones)} zones",
        fix="forerun hardware prices, or add the zone to your own price file",
    )


def _usd(price: Price, spot: bool) -> float:
    return (price.usd_per_chip_hour_spot if spot else None) or price.usd_per_chip_hour_on_demand


@cache
def _shipped() -> tuple[Price, ...]:
    return tuple(_price(row, "prices.csv") for row in shipped("prices.csv").rows)


def _override(path: Path) -> list[Price]:
    """Return the prices of the user's file."""
    try:
        table = parsed(read_regular(path, MAX_PRICES_BYTES).decode("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "E-HARDWARE-012",
            f"the price file {path} cannot be read",
            why=str(error),
            fix="check the path; it is a CSV file with the columns " + ",".join(COLUMNS),
        ) from error
    _check_columns(path, table)
    return [_price(row, str(path)) for row in table.rows]


def _check_columns(path: Path, table: Table) -> None:
    missing = [column for column in REQUIRED if column not in table.columns]
    unknown = [column for column in table.columns if column not in COLUMNS]
    if unknown:
        near = did_you_mean(unknown[0], COLUMNS)
        raise UserError(
            "E-HARDWARE-013",
            f"{path}: unknown column {unknown[0]!r}" + (f": did you mean {near}?" if near else ""),
            why="columns of a price file: " + ",".join(COLUMNS),
            fix="rename or remove the column in the header line",
        )
    if missing:
        raise UserError(
            "E-HARDWARE-014",
            f"{path}: column {missing[0]!r} is missing",
            why="needed: " + ",".join(REQUIRED) + "; optional: kind, " + SPOT + ", source",
            fix="add it to the header line",
        )


def _price(row: Row, file: str) -> Price:
    """Return the price in a row; raise an error that names the invalid cell."""
    generation = canonical_name(row.text("generation"))
    try:
        generation = chip_named(generation).name
    except UserError as error:
        raise _wrong(file, row, "generation", error.why) from error
    if not row.text("zone"):
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
    spot, source = _amount(row, SPOT, file), row.text("source") or file
    return Price(generation, row.text("zone"), on_demand, spot, row.text("date"), source, row.text("kind"))


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
