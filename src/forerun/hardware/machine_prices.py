"""Prices of GPU machines per hour and zone, from the dated table `tables/machines.csv`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from forerun.hardware.rows import shipped


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
