"""The options of a run: which slices in which zones, at which price, in the order in which they are tried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud.compute.machine_types import rented_name
from forerun.cloud.provider import Capacity
from forerun.cloud.record.entries import Option
from forerun.errors import UserError
from forerun.hardware.prices import Price, machine_prices, prices
from forerun.hardware.slices import Slice, slice_named

GPU_MACHINE = re.compile(r"(a2|a3|a4|g2|g4)-[a-z0-9-]+")
COMPUTE_ONLY = ("tpu7x",)  # generations that the Cloud TPU API does not have
COMPUTE_TOO = ("v5p", "v6e")
MOST_ZONES = 4  # without --zones; more would rent far from the bucket, at a higher price


def is_gpu_machine(name: str) -> bool:
    """Return whether a name is that of a GPU machine type, such as `a3-highgpu-8g`."""
    return GPU_MACHINE.fullmatch(name) is not None


def slice_offers(
    name: str,
    capacity: Capacity,
    zones: Sequence[str] = (),
    *,
    row: Mapping[str, Any] | None = None,
    prices_file: str | None = None,
    provider: str | None = None,
    usd_per_hour: float | None = None,
) -> list[Option]:
    """Return a slice in each of its zones: in the order of `zones`, or the cheapest zones.

    Args:
      name: a slice, a GPU machine (`h100-8`), or a GPU machine type (`a3-highgpu-8g`).
      row: the row of the plan for this slice; None if it was not planned.
      provider: `tpu` or `compute`; None: the Cloud TPU API for the generations that it has.
      usd_per_hour: the price of the slice in all `zones`, for machines without a price in the tables.

    Raises:
      UserError: No price is known, so no budget could be kept.
    """
    name = rented_name(name)
    if is_gpu_machine(name):
        return _gpu_offers(name, capacity, zones, usd_per_hour, row)
    slice_ = slice_named(name)
    known = _rates(slice_, capacity, prices_file)
    if usd_per_hour is not None:
        known = {zone: usd_per_hour / slice_.chips for zone in zones or known}
    chosen = list(zones) or sorted(known, key=lambda zone: (known[zone], zone))[:MOST_ZONES]
    missing = [zone for zone in chosen if zone not in known]
    if missing or not chosen:
        raise _without_price(slice_.name, capacity, missing, list(known))
    return [_option(slice_, zone, capacity, known[zone], row, provider) for zone in chosen]


def _option(
    slice_: Slice, zone: str, capacity: Capacity, usd_per_chip_hour: float, row: Mapping[str, Any] | None, provider: Any
) -> Option:
    return Option(
        provider=_provider(slice_.chip.name, provider),
        slice=slice_.name,
        zone=zone,
        capacity=capacity,
        hosts=slice_.hosts,
        usd_per_hour=usd_per_chip_hour * slice_.chips,
        **_planned(row, capacity),
    )


def _planned(row: Mapping[str, Any] | None, capacity: Capacity) -> dict[str, Any]:
    """Return the values of an option that are from the plan: times, preemptions and the program."""
    if row is None:
        return {}
    hours, preemptions = row["hours"], None
    if capacity == "spot" and row["spot"] and hours is not None:
        hours, preemptions = hours * (1 + row["spot"]["overhead"]), row["spot"]["preemptions"]
    return {
        "step_seconds": (row["step_seconds"] or {}).get("mid"),
        "hours": hours,
        "program": row["program"] or "",
        "preemptions": preemptions,
    }


def _provider(generation: str, asked: str | None) -> str:
    own = "compute" if generation in COMPUTE_ONLY else "tpu"
    if asked in (None, own):
        return own
    if asked == "compute" and generation in COMPUTE_TOO:
        return asked
    raise UserError(
        "E-CLOUD-051",
        f"--provider {asked} does not have {generation}",
        why="Compute Engine has v5p, v6e and tpu7x; the Cloud TPU API has v2 to v6e",
        fix=f"remove --provider, or write --provider {own}",
    )


def _rates(slice_: Slice, capacity: Capacity, prices_file: str | None) -> dict[str, float]:
    """Return USD per chip-hour by zone. Without a spot price, the price on demand is an upper bound."""
    kind = "pod" if slice_.hosts > 1 else "single"
    fitting = [
        price for price in prices(prices_file) if price.generation == slice_.chip.name and price.kind in ("", kind)
    ]
    return {price.zone: _rate(price, capacity) for price in fitting}


def _rate(price: Price, capacity: Capacity) -> float:
    # Flex-start and reservations have prices of their own, which are lower: the price on demand keeps the budget.
    spot = price.usd_per_chip_hour_spot if capacity == "spot" else None
    return price.usd_per_chip_hour_on_demand if spot is None else spot


def _gpu_offers(
    name: str,
    capacity: Capacity,
    zones: Sequence[str],
    usd_per_hour: float | None,
    row: Mapping[str, Any] | None,
) -> list[Option]:
    prices = {zone: price.usd_per_hour(spot=capacity == "spot") for zone, price in machine_prices(name).items()}
    if usd_per_hour is not None:
        prices = dict.fromkeys(zones or prices, usd_per_hour)
    chosen = list(zones) or sorted(prices, key=lambda zone: (prices[zone], zone))
    missing = [zone for zone in chosen if zone not in prices]
    if missing or not chosen:
        raise UserError(
            "E-CLOUD-052",
            f"no price of {name} is known" + (f" in {', '.join(missing)}" if missing else ""),
            why=f"the budget is kept by the price; the table has {name} in {', '.join(sorted(prices)) or 'no zone'}",
            fix=f"look the price up at cloud.google.com/compute/gpus-pricing; for example: --on {name} "
            "--zones us-central1-a --usd-per-hour 88.5",
        )
    return [Option("compute", name, zone, capacity, 1, prices[zone], **_planned(row, capacity)) for zone in chosen]


def _without_price(name: str, capacity: Capacity, missing: Sequence[str], known: Sequence[str]) -> UserError:
    where = f" in {', '.join(missing)}" if missing else ""
    return UserError(
        "E-CLOUD-053",
        f"no price of {name} ({capacity}) is known{where}",
        why=f"the budget is kept by the price; the table has {name} in {', '.join(sorted(known)) or 'no zone'}",
        fix="choose one of these zones, or give the price: --usd-per-hour 10.80, or --prices FILE",
    )
