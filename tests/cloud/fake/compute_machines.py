"""Machine types of Compute Engine: which slice, how many hosts, and which price."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fake import tables

TPU_MACHINES = {"ct5lp-hightpu": "v5e", "ct5p-hightpu": "v5p", "ct6e-standard": "v6e", "tpu7x-standard": "tpu7x"}
# Zones without TPUs, for small machines. Zones that only have TPUs lack e2 machines: `ONLY_TPUS`.
MORE_ZONES = ("us-central1-a", "us-central1-b", "us-east5-a", "us-east5-b", "us-east5-c", "europe-west4-a")
ONLY_TPUS = ("us-central2-b", "us-south1-c")
GPUS = {
    "a2-highgpu-1g": ("nvidia-tesla-a100", 1),
    "a2-highgpu-2g": ("nvidia-tesla-a100", 2),
    "a2-highgpu-4g": ("nvidia-tesla-a100", 4),
    "a2-highgpu-8g": ("nvidia-tesla-a100", 8),
    "a2-ultragpu-1g": ("nvidia-a100-80gb", 1),
    "a2-ultragpu-2g": ("nvidia-a100-80gb", 2),
    "a2-ultragpu-4g": ("nvidia-a100-80gb", 4),
    "a2-ultragpu-8g": ("nvidia-a100-80gb", 8),
    "a3-highgpu-1g": ("nvidia-h100-80gb", 1),
    "a3-highgpu-2g": ("nvidia-h100-80gb", 2),
    "a3-highgpu-4g": ("nvidia-h100-80gb", 4),
    "a3-highgpu-8g": ("nvidia-h100-80gb", 8),
    "a3-megagpu-8g": ("nvidia-h100-mega-80gb", 8),
    "g2-standard-4": ("nvidia-l4", 1),
    "g2-standard-8": ("nvidia-l4", 1),
    "g2-standard-12": ("nvidia-l4", 1),
    "g2-standard-16": ("nvidia-l4", 1),
    "g2-standard-24": ("nvidia-l4", 2),
    "g2-standard-32": ("nvidia-l4", 1),
    "g2-standard-48": ("nvidia-l4", 4),
    "g2-standard-96": ("nvidia-l4", 8),
}
SMALL = re.compile(r"(e2|n1|n2|n2d|n4|c3|c4|t2d)-(micro|small|medium|standard-\d+|highmem-\d+|highcpu-\d+)")


@dataclass(frozen=True)
class MachineKind:
    """`slice` is the slice that one machine, or a group of machines with a topology, forms."""

    machine: str
    slice: str
    generation: str
    chips: int
    hosts: int
    usd_per_hour: float


def machine_kind(
    machine: str, zone: str, topology: str | None, count: int, *, spot: bool, prices: dict[str, float]
) -> MachineKind | None:
    """Return what `count` machines are, or None if the zone does not offer them or the topology does not match."""
    family, _, size = machine.rpartition("-")
    if family in TPU_MACHINES:
        generation, per_machine = TPU_MACHINES[family], int(size.removesuffix("t"))
        for shape in tables.shapes().values():
            chips = per_machine if topology is None else per_machine * count
            if shape.generation == generation and shape.chips == chips and topology in (None, shape.topology):
                price = tables.usd_per_hour(shape, zone, spot=spot)
                if price is None:
                    price = prices.get(machine)
                if price is None:
                    return None
                many = 1 if topology is not None else count
                return MachineKind(machine, shape.name, generation, chips * many, count, price * many)
        return None
    if machine in GPUS or (SMALL.fullmatch(machine) and not (machine.startswith("e2-") and zone in ONLY_TPUS)):
        return MachineKind(machine, machine, machine.split("-")[0], 0, count, prices.get(machine, 0.0) * count)
    return None


def zone_names() -> list[str]:
    return sorted({*tables.all_zones(), *MORE_ZONES})


def region_of(zone: str) -> str:
    return zone.rsplit("-", 1)[0]
