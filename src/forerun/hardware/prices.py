"""Prices of chips per hour, provider and zone, from the dated tables and the user's price file.

`tables/prices.csv` has TPUs, `tables/machines.csv` complete GPU machines of Google Cloud, and `tables/gpu_prices.csv`
GPUs of other providers.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.errors import UserError, did_you_mean
from forerun.files import read_regular
from forerun.hardware.chips import chip_named
from forerun.hardware.gpu_names import gpus_of
from forerun.hardware.rows import Row, Table, parsed, shipped
from forerun.units import MIB

ON_DEMAND, SPOT = "usd_per_chip_hour_on_demand", "usd_per_chip_hour_spot"
KINDS = ("", "single", "pod")
GOOGLE_CLOUD = "gcp"
COLUMNS = ("generation", "zone", "kind", "provider", "chips", ON_DEMAND, SPOT, "machine_type", "date", "source")
REQUIRED = ("generation", ON_DEMAND, "date")
MAX_PRICES_BYTES = 8 * MIB


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


@dataclass(frozen=True)
class MachinePrice:
    """USD per hour of one machine, with its GPUs, in one zone."""

    machine_type: str
    zone: str
    usd_per_hour_on_demand: float
    usd_per_hour_spot: float | None
    date: str
    source: str

    def usd_per_hour(self, *, spot: bool) -> float:
        """Return the price. Without a spot price, the price on demand is an upper bound."""
        if spot and self.usd_per_hour_spot is not None:
            return self.usd_per_hour_spot
        return self.usd_per_hour_on_demand


def machine_prices(machine_type: str) -> dict[str, MachinePrice]:
    """Return the prices of a machine type such as `a3-highgpu-8g` by zone; an empty dictionary if none is known."""
    return {price.zone: price for price in all_machine_prices() if price.machine_type == machine_type}


@cache
def all_machine_prices() -> tuple[MachinePrice, ...]:
    """Return the prices of all machine types in all zones."""
    return tuple(
        MachinePrice(
            row.text("machine_type"),
            f"{row.text('region')}-{zone}",
            float(row.text("usd_per_hour_on_demand")),
            row.number("usd_per_hour_spot"),
            row.text("date"),
            row.text("source"),
        )
        for row in shipped("machines.csv").rows
        for zone in row.text("zones").split()
    )


def prices(override_file: str | None = None) -> list[Price]:
    """Return the shipped prices, with those of the user's file added.

    A row of the user's file replaces shipped rows of the same generation, provider, zone, kind and number of chips.
    Without a kind, it replaces all kinds; without a number of chips, it replaces all numbers.
    """
    if override_file is None:
        return list(_shipped())
    own = _override(Path(override_file))
    taken = {(one.generation, one.provider, one.zone, one.kind, one.chips) for one in own}
    kept = [
        one
        for one in _shipped()
        if not any(
            (one.generation, one.provider, one.zone, kind, chips) in taken
            for kind in {one.kind, ""}
            for chips in {one.chips, None}
        )
    ]
    return kept + own


def cheapest(
    chip_name: str,
    zone: str | None = None,
    spot: bool = False,
    hosts: int = 1,
    override_file: str | None = None,
    *,
    chips_per_host: int | None = None,
    providers: Sequence[str] = (),
) -> Price | None:
    """Return the lowest price of a chip, or None if no price is known.

    Args:
        chip_name: The chip.
        zone: One zone of Google Cloud; None is all zones and providers.
        spot: Compare spot prices instead of on-demand prices.
        hosts: Hosts of the slice. It matters only for v2 and v3, where more than one host costs the pod price.
        override_file: The user's price file.
        chips_per_host: GPUs of one machine: only prices of such machines count. None: machines of any size.
        providers: Only prices of these providers; empty is all.

    Raises:
        UserError: The zone or provider has no price of any chip, or the chip or the file is invalid.
    """
    known = prices(override_file)
    generation = chip_named(chip_name).name
    if zone is not None:
        check_zone(zone, known)
    check_providers(providers, known)
    fitting = [
        price
        for price in known
        if price.generation == generation
        and zone in (None, price.zone)
        and (not providers or price.provider in providers)
        and (None in (price.chips, chips_per_host) or price.chips == chips_per_host)
        and price.kind in ("", "pod" if hosts > 1 else "single")
        and not (spot and price.usd_per_chip_hour_spot is None)
    ]
    # With equal on-demand prices, prefer the zone with the lower spot price.
    return min(fitting, key=lambda price: (_usd(price, spot), price.usd_per_chip_hour_spot or math.inf), default=None)


def check_zone(zone: str, known: list[Price]) -> None:
    """Raise an error if no price is known in the zone."""
    zones = sorted({price.zone for price in known if price.zone})
    if zone in zones:
        return
    near = did_you_mean(zone, zones)
    raise UserError(
        "E-HARDWARE-011",
        f"no price is known in zone {zone!r}" + (f": did you mean {near}?" if near else ""),
        why=f"the price table has {len(zones)} zones",
        fix="forerun hardware prices, or add the zone to your own price file",
    )


def provider_names(provider: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of one or several providers in lower case, without duplicates."""
    names = provider.split(",") if isinstance(provider, str) else provider
    return tuple(dict.fromkeys(name.strip().lower() for name in names if name.strip()))


def providers_of(known: Sequence[Price]) -> list[str]:
    """Return the names of all providers with a price."""
    return sorted({price.provider for price in known})


def check_providers(providers: Sequence[str], known: Sequence[Price]) -> None:
    """Raise an error if no price is known of one of the providers."""
    names = providers_of(known) if providers else []
    for provider in providers:
        if provider not in names:
            near = did_you_mean(provider.lower(), names)
            raise UserError(
                "E-HARDWARE-021",
                f"no price of the provider {provider!r} is known" + (f": did you mean {near}?" if near else ""),
                why=f"the price table has {', '.join(names)}",
                fix=f"--provider {near or 'gcp'}, or add the provider to your own price file",
            )


def _usd(price: Price, spot: bool) -> float:
    return (price.usd_per_chip_hour_spot if spot else None) or price.usd_per_chip_hour_on_demand


@cache
def _shipped() -> tuple[Price, ...]:
    tables = ("prices.csv", "gpu_prices.csv")
    listed = [_price_in(row, name) for name in tables for row in shipped(name).rows]
    for machine in all_machine_prices():  # per GPU; the machine around the GPUs is included
        gpu, gpus = gpus_of(machine.machine_type) or ("", 0)
        if gpus:
            on_demand, spot = machine.usd_per_hour_on_demand / gpus, machine.usd_per_hour_spot
            usd = on_demand, None if spot is None else spot / gpus
            origin = machine.date, machine.source
            listed.append(Price(gpu, machine.zone, *usd, *origin, chips=gpus, machine_type=machine.machine_type))
    return tuple(listed)


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
    return [_price_in(row, str(path)) for row in table.rows]


def _check_columns(path: Path, table: Table) -> None:
    missing = [column for column in REQUIRED if column not in table.columns]
    if unknown := next((column for column in table.columns if column not in COLUMNS), None):
        near = did_you_mean(unknown, COLUMNS)
        raise UserError(
            "E-HARDWARE-013",
            f"{path}: unknown column {unknown!r}" + (f": did you mean {near}?" if near else ""),
            why="columns of a price file: " + ",".join(COLUMNS),
            fix="rename or remove the column in the header line",
        )
    if missing:
        raise UserError(
            "E-HARDWARE-014",
            f"{path}: column {missing[0]!r} is missing",
            why=f"needed: {','.join(REQUIRED)}; optional: {', '.join(c for c in COLUMNS if c not in REQUIRED)}",
            fix="add it to the header line",
        )


def _price_in(row: Row, file: str) -> Price:
    """Return the price in a row; raise an error that names the invalid cell."""
    try:
        generation = chip_named(row.text("generation")).name
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
    spot, chips = _amount(row, SPOT, file), row.text("chips")
    if chips and not (chips.isdigit() and int(chips) > 0):
        raise _wrong(file, row, "chips", "it is the number of chips of the machine, or empty for any number")
    return Price(
        generation,
        row.text("zone"),
        on_demand,
        spot,
        row.text("date"),
        row.text("source") or file,
        row.text("kind"),
        provider,
        int(chips) if chips else None,
        row.text("machine_type"),
    )


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
