"""Prices of chips per hour, provider and zone, from the dated tables and the user's price file.

`tables/prices.csv` has TPUs, `tables/machines.csv` complete GPU machines of Google Cloud, and `tables/gpu_prices.csv`
GPUs of other providers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from forerun.errors import UserError, did_you_mean
from forerun.files import read_regular
from forerun.hardware.chips import chip_named
from forerun.hardware.gpu_machine_types import gpus_of
from forerun.hardware.machine_prices import all_machine_prices
from forerun.hardware.price import ON_DEMAND, SPOT, Price, price_in
from forerun.hardware.rows import Table, parsed, shipped
from forerun.units import MIB

COLUMNS = ("generation", "zone", "kind", "provider", "chips", ON_DEMAND, SPOT, "machine_type", "date", "source")
REQUIRED = ("generation", ON_DEMAND, "date")
MAX_PRICES_BYTES = 8 * MIB


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
    listed = [price_in(row, name) for name in tables for row in shipped(name).rows]
    return (*listed, *_google_gpus())


def _google_gpus() -> list[Price]:
    """Return the prices of the GPU machines of Google Cloud, per GPU. The machine around the GPUs is included."""
    found = []
    for machine in all_machine_prices():
        gpu, gpus = gpus_of(machine.machine_type) or ("", 0)
        if gpus:
            spot = None if machine.usd_per_hour_spot is None else machine.usd_per_hour_spot / gpus
            found.append(
                Price(
                    gpu,
                    machine.zone,
                    machine.usd_per_hour_on_demand / gpus,
                    spot,
                    machine.date,
                    machine.source,
                    chips=gpus,
                    machine_type=machine.machine_type,
                )
            )
    return found


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
    return [price_in(row, str(path)) for row in table.rows]


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
            why="needed: "
            + ",".join(REQUIRED)
            + "; optional: "
            + ", ".join(column for column in COLUMNS if column not in REQUIRED),
            fix="add it to the header line",
        )
