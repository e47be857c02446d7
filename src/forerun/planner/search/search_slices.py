"""The TPU slices and GPU machines of a search: those that `--on` names or matches, or sensible ones."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.slices import Slice, gpu_machines, slice_named, slices
from forerun.planner.search.lower_bound import Footprint

GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")  # without --on; v2 and v3 must be named there
SIZES_PER_GENERATION = 3
GPUS = ("H100", "H200", "B200", "A100-80", "A100-40", "L40S", "L4", "4090", "5090")  # without --on
SIZES_PER_GPU = 2
NODES = (2, 4, 8)  # numbers of machines with eight GPUs, for jobs that are too large for one machine


def slices_like(pattern: str) -> list[Slice]:
    """Return the slices of a comma-separated list of names and globs.

    Globs match standard TPU slices and single GPU machines only.
    """
    chosen: dict[str, Slice] = {}
    for part in pattern.split(","):
        matches = _matches(part) if _is_glob(part) else [slice_named(part)]
        chosen |= {one.name: one for one in matches}
    return list(chosen.values())


def named_exactly(pattern: str | None) -> set[str]:
    """Return the names of the slices that a list of names and globs names without a glob."""
    parts = pattern.split(",") if pattern else []
    return {slice_named(part).name for part in parts if not _is_glob(part)}


def _is_glob(part: str) -> bool:
    return any(mark in part for mark in "*?[")


def _matches(part: str) -> list[Slice]:
    glob = part.strip().lower().replace("v5litepod", "v5e")
    matches = [one for one in (*slices(), *gpu_machines()) if fnmatchcase(one.name, glob)]
    if matches:
        return matches
    raise UserError(
        "E-PLAN-003",
        f"--on {part.strip()} matches no slice",
        why="a pattern is compared with the names of standard slices and single GPU machines, such as v6e-8 or h100-8",
        fix="--on 'v6e-*,h100-*', or choose from: forerun hardware slices",
    )


def default_search_slices(job: Job, sizes: Footprint) -> list[Slice]:
    """Return the smallest slices of each generation, and machines of each GPU, that hold weights and optimizer."""

    def holding(known: Iterator[Slice], most: int) -> list[Slice]:
        own = (one for one in known if one.devices >= (job.devices or 1))
        large = [one for one in own if one.used_devices(job.devices) * one.chip.usable_bytes > sizes.resting_bytes]
        return large[:most]

    chosen = []
    for generation in GENERATIONS:
        own = (one for one in slices() if one.chip.name == generation)
        chosen += holding(own, SIZES_PER_GENERATION)
    for gpu in GPUS:
        chosen += holding(_machines(gpu), SIZES_PER_GPU)
    return chosen


def _machines(gpu: str) -> Iterator[Slice]:
    """Yield the machines of a GPU, smallest first, then several of the largest if the speed of its network is known."""
    largest = None
    for one in gpu_machines():
        if one.chip.name == gpu:
            yield one
            largest = one
    if largest is not None and largest.chip.gpu and largest.chip.gpu.network_bytes_per_second:
        yield from (slice_named(f"{largest.name}x{nodes}") for nodes in NODES)
