"""TPU slices and GPU machines by their usual names, and the topology that the compiler needs for each.

The number in a name counts TensorCores for v2, v3, v4 and v5p (two per chip) and chips for v5e and v6e. tpu7x slices
are named by their topology. Any generation may also be given with an explicit topology: `v5p:8x8x16`.

A number in front of a name, as in `2xv5e-256`, is several slices that the data-centre network joins.

The name of a GPU machine is the GPU and the number of GPUs: `h100-8`, `a100-80-1`, `4090-1`. `h100-8x2` is two machines
(nodes) with eight GPUs each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Literal

from forerun.errors import UserError, did_you_mean
from forerun.hardware.chips import Chip, canonical_name, chip_named, chips
from forerun.hardware.gpu_names import GPU_COUNTS, GpuMachineName, gpu_machine_name, gpu_mistake
from forerun.hardware.rows import shipped

SHOW = "forerun hardware slices"
CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5e": 1, "v6e": 1, "tpu7x": 2}
NAMED_BY_CORES = ("v2", "v3", "v4", "v5p")
NAMED_BY_CHIPS = ("v5e", "v6e")
# Chips in the largest single slice: v5p and v5e as in the sources of chips.csv, the others as generally known.
LARGEST_CHIPS = {"v2": 256, "v3": 1024, "v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}
MOST_SLICES = 256  # that a name may have
CUBE = 4  # sides of large 3D slices are multiples of this


@dataclass(frozen=True)
class Slice:
    """A TPU slice, or one or more GPU machines.

    `topology` and `topology_options` are arguments of `jax.experimental.topologies.get_topology_desc`. The topology of
    GPUs is 1 x nodes x GPUs per node.
    """

    name: str
    chip: Chip
    chips: int
    devices: int
    hosts: int
    topology: str
    topology_options: dict[str, Any] = field(default_factory=dict, hash=False)
    slices: int = 1  # slices that the data-centre network joins; chips, devices and hosts count all of them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(side) for side in self.topology.rpartition(":")[2].split("x"))

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        return self.chip.platform

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    def used_devices(self, wanted: int | None) -> int:
        """Return the number of devices that a job with `devices: wanted` uses on this slice; None means all.

        Raise an error if the slice has fewer.
        """
        if wanted is not None and wanted > self.devices:
            raise UserError(
                "E-HARDWARE-017",
                f"devices={wanted} is more than {self.name} has",
                why=f"{self.name} has {self.devices} device{'' if self.devices == 1 else 's'}",
                fix=f"devices={self.devices}, leave devices out, or choose a larger slice: {SHOW}",
            )
        return wanted or self.devices


@cache
def slices() -> tuple[Slice, ...]:
    """Return the standard TPU slices of every generation, smallest first."""
    return tuple(
        _slice(row.text("name"), row.text("generation"), _sides(row.text("topology")))
        for row in shipped("slices.csv").rows
    )


@cache
def gpu_machines() -> tuple[Slice, ...]:
    """Return one machine of each GPU with each usual number of GPUs, smallest first."""
    return tuple(_gpu_machine(GpuMachineName(chip, count, 1)) for chip in chips() if chip.gpu for count in GPU_COUNTS)


def _gpu_machine(name: GpuMachineName) -> Slice:
    devices = name.gpus * name.nodes
    return Slice(name.text, name.chip, devices, devices, name.nodes, f"1x{name.nodes}x{name.gpus}")


def slice_named(name: str) -> Slice:
    """Return the slice or GPU machine with a name such as v5e-8, v5litepod-8, tpu7x-2x2x1, v5p:8x8x16 or h100-8.

    Raises:
        UserError: No such slice exists. The error suggests the nearest one.
    """
    several = re.fullmatch(r"\s*(\d+)x([a-zA-Z].*)", name)
    # 8xh100 is a mistake in the name of one machine. 2xh100-8 is a number of machines, which has its own error.
    if several is not None and (_parts(several[2])[0] in CORES_PER_CHIP or gpu_machine_name(several[2]) is not None):
        return several_slices(slice_named(several[2]), int(several[1]))
    if (machine := gpu_machine_name(name)) is not None:
        return _gpu_machine(machine)
    generation, mark, size = _parts(name)
    wanted = f"{generation}{mark}{size}"
    standard = {known.name: known for known in slices()}
    if wanted in standard:
        return standard[wanted]
    if generation not in CORES_PER_CHIP or not size:
        raise _unknown(name, wanted, _common_mistake(generation, size))
    if mark == ":" and re.fullmatch(r"\d+(x\d+)+", size):
        return _explicit(name, generation, _sides(size))
    raise _unknown(name, wanted, _common_mistake(generation, size))


def slice_count(devices: Sequence[Any]) -> int:
    """Return the number of slices of jax devices. Devices that do not know their slice are one."""
    return len({getattr(device, "slice_index", None) or 0 for device in devices})


def several_slices(one: Slice, count: int) -> Slice:
    """Return `count` slices that are equal to `one`; raise an error for a number or a machine that is not possible."""
    if count == 1:
        return one
    if count < 1 or count > MOST_SLICES or one.platform == "gpu":
        gpu = one.platform == "gpu"
        raise UserError(
            "E-HARDWARE-029",
            f"{count}x{one.name} is not a number of slices",
            why="a number in front of a name counts TPU slices" if gpu else f"forerun plans 1 to {MOST_SLICES} slices",
            fix=f"use {one.name}x{count} for {count} machines"
            if gpu
            else f"use 2x{one.name}, or {one.name} for one slice",
        )
    return replace(
        one,
        name=f"{count}x{one.name}",
        chips=count * one.chips,
        devices=count * one.devices,
        hosts=count * one.hosts,
        topology_options={**one.topology_options, "num_slices": count},
        slices=count,
    )


def slice_of_devices(chip: Chip, devices: Sequence[Any]) -> Slice:
    """Return the slice that consists of some jax devices of one chip generation.

    Devices of a TPU have coordinates, and the slice is the smallest box that contains them. If a job uses a part of a
    slice, its box is smaller than the slice and has no wrap-around links. Devices without coordinates are assumed to be
    in one row.
    """
    hosts = Counter(getattr(device, "process_index", 0) for device in devices)
    if chip.gpu:
        return _gpu_machine(GpuMachineName(chip, max(hosts.values()), len(hosts)))
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(by_slice) > 1:
        return several_slices(slice_of_devices(chip, next(iter(by_slice.values()))), len(by_slice))
    count = -(-len(devices) // chip.devices_per_chip)
    coordinates = [tuple(device.coords) for device in devices if getattr(device, "coords", None)]
    sides = tuple(max(axis) - min(axis) + 1 for axis in zip(*coordinates, strict=True)) or (count, 1)
    flat = chip.name in ("v2", "v3", *NAMED_BY_CHIPS)
    sides = sides[:2] if flat else (*sides, 1)[:3]
    for known in slices():
        if known.chip.name == chip.name and known.shape == sides:
            return known
    topology = f"{chip.name}:{'x'.join(map(str, sides))}"
    return Slice(topology, chip, prod(sides), prod(sides) * chip.devices_per_chip, len(hosts), topology)


def _parts(name: str) -> tuple[str, str, str]:
    """Return (generation, separator, size) of a name: `v5litepod-8` gives ("v5e", "-", "8")."""
    plain = name.strip().lower().removeprefix("tpu ").replace("tpu-v", "v").replace(" ", "")
    found = re.fullmatch(r"([a-z0-9]+?)(?:([-:])(.*))?", plain)
    if not found:
        return plain, "", ""
    return canonical_name(found[1]), found[2] or "", found[3] or ""


def _explicit(name: str, generation: str, sides: tuple[int, ...]) -> Slice:
    """Return the slice with an explicit topology; raise an error if the topology is impossible."""
    for known in slices():
        if known.chip.name == generation and known.shape == sides:
            return known
    shape, chips = "x".join(map(str, sides)), prod(sides)
    flat = generation in ("v2", "v3", *NAMED_BY_CHIPS)
    if len(sides) != (2 if flat else 3):
        why = f"a {generation} topology has {2 if flat else 3} sides, {shape} has {len(sides)}"
    elif chips > LARGEST_CHIPS[generation]:
        why = f"{shape} is {chips} chips; one {generation} slice has at most {LARGEST_CHIPS[generation]}"
    elif flat:
        why = f"{generation} slices come in the standard shapes only"
    elif any(side % CUBE or side == 0 for side in sides):
        why = f"above 2x4x4 a {generation} slice is made of 4x4x4 cubes: every side is a multiple of 4"
    elif list(sides) != sorted(sides):
        why = "sides are written smallest first: " + "x".join(map(str, sorted(sides)))
    else:
        return _slice(f"{generation}:{shape}", generation, sides)
    raise UserError("E-HARDWARE-018", f"there is no slice {name!r}", why=why, fix=_fix(_nearest(generation, chips)))


def _slice(name: str, generation: str, sides: tuple[int, ...]) -> Slice:
    """Return the slice with the number of devices and hosts that follow from its topology."""
    chip, chips = chip_named(generation), prod(sides)
    options: dict[str, Any] = {}
    hosts = max(chips // 4, 1)
    if generation in NAMED_BY_CHIPS:
        # A slice of one VM has 1, 4 or 8 chips. Larger slices consist of 4-chip VMs.
        bounds = {1: (1, 1, 1), 8: (2, 4, 1)}.get(chips, (2, 2, 1))
        options["chips_per_host_bounds"] = bounds
        hosts = chips // prod(bounds)
    if generation == "v4":
        # Without this option the compiler has two devices per chip, each with half of the memory. Cloud TPUs have one.
        options["chip_config_name"] = "megacore"
    topology = f"{generation}:{'x'.join(map(str, sides))}"
    return Slice(name, chip, chips, chips * chip.devices_per_chip, hosts, topology, options)


def _sides(text: str) -> tuple[int, ...]:
    return tuple(int(side) for side in text.split("x"))


def _common_mistake(generation: str, size: str) -> tuple[str, str | None] | None:
    """Return (why, suggested name) for common mistakes in names, or None. The suggestion may be None."""
    if generation == "v5":
        return "v5 is two chips: v5e (16 GB) and v5p (95 GB)", f"v5e-{size}" if size else "v5e-8"
    if generation in ("v6", "v6p"):
        return "the v6 generation is v6e only", f"v6e-{size}" if size else "v6e-8"
    if generation in ("v7", "v7e", "tpu7", "tpuv7"):
        return "the seventh generation is called tpu7x and named by its topology", "tpu7x-2x2x1"
    if re.match(r"(tpu)?v?8", generation):
        return "the newest generation in the table is tpu7x", None
    if generation not in CORES_PER_CHIP:
        return None
    if re.fullmatch(r"\d+(x\d+)+", size):
        chips = prod(_sides(size))
        return f"{size} is a topology of {chips} chips, but {generation} slices are named by a number", _nearest(
            generation, chips
        )
    if not size.isdigit():
        return f"a slice name is the generation and a size, such as {_nearest(generation, 4)}", None
    return _size_mistake(generation, int(size))


def _size_mistake(generation: str, size: int) -> tuple[str, str | None]:
    """Return (why, suggested name) for a number that no standard slice of the generation has."""
    if generation == "tpu7x":
        near = _nearest(generation, max(size // 2, 1))
        return "tpu7x is named by its topology: tpu7x-2x2x1 is 4 chips and 8 devices", near
    largest = LARGEST_CHIPS[generation] * (2 if generation in NAMED_BY_CORES else 1)
    if size > largest:
        return f"the largest {generation} slice is {generation}-{largest}", _nearest(
            generation, LARGEST_CHIPS[generation]
        )
    if generation in NAMED_BY_CORES:
        why = f"{generation} names count TensorCores, two per chip; the smallest is {generation}-8 with 4 chips"
        # A name such as v4-4 nearly always means four chips, not four cores.
        return why, _nearest(generation, size if size <= 4 else size / 2)
    why = f"{generation} names count chips (one TensorCore and one JAX device each): 1, 4, 8, 16, 32, 64, 128, 256"
    return why, _nearest(generation, size)


def _nearest(generation: str, chips: float) -> str:
    """Return the standard slice with the nearest number of chips by ratio; the larger one of a tie."""
    own = [known for known in slices() if known.chip.name == generation]
    wanted = max(chips, 1)
    return min(own, key=lambda known: (max(known.chips / wanted, wanted / known.chips), -known.chips)).name


def _unknown(name: str, wanted: str, confusion: tuple[str, str | None] | None) -> UserError:
    confusion = gpu_mistake(name) or confusion
    if confusion:
        why, use = confusion
    else:
        use = did_you_mean(wanted, [known.name for known in (*slices(), *gpu_machines())])
        gpus = ", ".join(chip.name.lower() for chip in chips() if chip.gpu)
        why = f"known generations of TPUs: {', '.join(CORES_PER_CHIP)}; GPUs: {gpus}"
    return UserError(
        "E-HARDWARE-019",
        f"no slice is called {name!r}" + (f": did you mean {use}?" if use else ""),
        why=why,
        fix=_fix(use),
    )


def _fix(use: str | None) -> str:
    return f"use {use}, or choose from: {SHOW}" if use else f"choose from: {SHOW}"
