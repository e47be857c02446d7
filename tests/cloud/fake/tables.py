"""Slices, their hosts and their prices, read from the files of the package without its code."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parents[3] / "src" / "forerun" / "hardware" / "tables"
# The names in the Cloud TPU API differ from the short ones for v5e only.
API_GENERATIONS = {"v5litepod": "v5e"}
ONE_HOST = {"v5e": (1, 4, 8), "v6e": (1, 4, 8)}
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


@dataclass(frozen=True)
class SliceShape:
    """A slice: `name` is the short one, such as `v5e-16`; `api_name` that of the Cloud TPU API, `v5litepod-16`."""

    name: str
    api_name: str
    generation: str
    topology: str
    chips: int
    hosts: int


@cache
def rows(file: str) -> tuple[dict[str, str], ...]:
    lines = [line for line in (TABLES / file).read_text("utf-8").splitlines() if not line.startswith("#")]
    return tuple(csv.DictReader(lines))


@cache
def shapes() -> dict[str, SliceShape]:
    """Return all slices by their short name and by their name in the API."""
    found: dict[str, SliceShape] = {}
    per_host = {row["name"]: int(row["chips_per_host"] or 8) for row in rows("chips.csv")}
    for row in rows("slices.csv"):
        generation, name = row["generation"], row["name"]
        chips = math.prod(int(side) for side in row["topology"].split("x"))
        # Slices of several v5e or v6e hosts have 4 chips per host; one host has up to 8.
        most = (chips if chips <= 8 else 4) if generation in ONE_HOST else per_host[generation]
        api_name = name.replace("v5e-", "v5litepod-")
        shape = SliceShape(name, api_name, generation, row["topology"], chips, max(1, chips // most))
        found[name] = found[api_name] = shape
    return found


def shape_with(generation: str, topology: str) -> SliceShape | None:
    """Return the slice of a topology. A topology without a standard name is called `v5p:8x8x16`."""
    for shape in shapes().values():
        if (shape.generation, shape.topology) == (generation, topology):
            return shape
    if not re.fullmatch(r"\d+(x\d+)+", topology) or not zones(generation):
        return None
    chips, name = math.prod(int(side) for side in topology.split("x")), f"{generation}:{topology}"
    return SliceShape(name, name, generation, topology, chips, max(1, chips // 4))


def zones(generation: str) -> list[str]:
    return sorted({row["zone"] for row in rows("prices.csv") if row["generation"] == generation})


def all_zones() -> list[str]:
    return sorted({row["zone"] for row in rows("prices.csv")})


def usd_per_hour(shape: SliceShape, zone: str, *, spot: bool) -> float | None:
    """Return the price of a slice, or None if the zone does not offer it.

    Spot capacity in a zone without a spot price is billed as on demand.
    """
    for row in rows("prices.csv"):
        kind = "single" if shape.hosts == 1 else "pod"
        if row["generation"] == shape.generation and row["zone"] == zone and row["kind"] in ("", kind):
            price = (row["usd_per_chip_hour_spot"] if spot else "") or row["usd_per_chip_hour_on_demand"]
            return float(price) * shape.chips
    return None
