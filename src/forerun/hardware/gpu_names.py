"""Names of GPU machines, and the machine types of Google Cloud with GPUs.

`h100-8` is one machine with eight GPUs, `h100-8x2` is two of them. Source of the machine types: the pages on
accelerator-optimized machines at docs.cloud.google.com/compute, 2026-11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.hardware.chips import Chip, canonical_name, chips

GPU_COUNTS = (1, 2, 4, 8)  # GPUs of one machine
LARGEST_NODES = 64
# GPUs that are not in the table. Their names are near to those of others, but no other GPU is what the user means.
_UNLISTED = re.compile(
    r"(rtx-?)?([vp]100|a(10g?|16|30|40|800|4000|5000|6000)|h(20|800)|g[bh]\d00|b300|[2345]0[5-9]0|mi\d+x?|l40)"
)


@dataclass(frozen=True)
class GpuMachineName:
    """The parts of a name: the GPU, the GPUs of one machine, and the machines."""

    chip: Chip
    gpus: int
    nodes: int

    @property
    def text(self) -> str:
        """The name as forerun writes it."""
        return f"{self.chip.name.lower()}-{self.gpus}" + (f"x{self.nodes}" if self.nodes > 1 else "")


def gpu_machine_name(name: str) -> GpuMachineName | None:
    """Return the parts of a name such as `h100-8` or `rtx4090-1`, or None if it is not the name of a GPU machine.

    Raises:
        UserError: The GPU exists, but not a machine with this number of GPUs, or no network of it is known.
    """
    found = re.fullmatch(r"(.+)-(\d+)(?:x(\d+))?", _plain(name))
    chip = _gpu(found[1]) if found else None
    if found is None or chip is None or _gpu(_plain(name)):
        return None
    gpus, nodes = int(found[2]), int(found[3] or 1)
    if gpus not in GPU_COUNTS or not 1 <= nodes <= LARGEST_NODES:
        raise UserError(
            "E-HARDWARE-020",
            f"there is no machine {name!r}",
            why=f"a machine has {', '.join(map(str, GPU_COUNTS))} GPUs, and a job at most {LARGEST_NODES} machines",
            fix=f"use {_possible(chip, gpus, nodes).text}, or choose from: forerun hardware slices",
        )
    if nodes > 1 and chip.gpu and chip.gpu.network_bytes_per_second is None:
        raise UserError(
            "E-HARDWARE-022",
            f"{name!r} is {nodes} machines, and no network between machines with {chip.name} is known",
            why="the table has no network rate for this GPU, so the time of a step would be a guess",
            fix=f"use one machine: {chip.name.lower()}-{gpus}; or a GPU with a network: {_networked()}",
        )
    return GpuMachineName(chip, gpus, nodes)


def gpu_mistake(name: str) -> tuple[str, str | None] | None:
    """Return (why, suggested name) if a wrong name seems to mean a GPU machine, or None. The suggestion may be None."""
    plain = _plain(name)
    known = ", ".join(chip.name.lower() for chip in chips() if chip.gpu)
    rule = "the name of a GPU machine is the GPU and the number of GPUs"
    for pattern in (
        r"(?P<gpu>.+)",
        r"(?P<gpus>\d+)x?[-:]?(?P<gpu>\D.*)",
        r"(?P<gpu>.+?)[x:](?P<gpus>\d+)(?:x(?P<nodes>\d+))?",
        r"(?P<gpu>.+)-(?P<gpus>\d+)(?:x(?P<nodes>\d+))?",
    ):
        found = re.fullmatch(pattern, plain)
        if found is None:
            continue
        parts = found.groupdict()
        if parts["gpu"] == "a100":
            return "A100 is two GPUs: a100-40 and a100-80, by their memory", _suggested("a100-80", parts)
        if chip := _gpu(parts["gpu"]):
            return rule, _suggested(chip.name.lower(), parts)
        if _UNLISTED.fullmatch(parts["gpu"]):
            return f"the table has no GPU {parts['gpu']}; it has {known}", None
    return None


def _suggested(gpu: str, parts: dict[str, str | None]) -> str:
    chip = _gpu(gpu)
    assert chip is not None
    usual = 8 if chip.gpu and chip.gpu.nvlink_bytes_per_second else 1
    return _possible(chip, int(parts.get("gpus") or usual), int(parts.get("nodes") or 1)).text


def _possible(chip: Chip, gpus: int, nodes: int) -> GpuMachineName:
    """Return the smallest possible machine, or number of machines, with at least the GPUs that were asked for."""
    wanted = max(gpus, 1) * max(nodes, 1)
    largest = GPU_COUNTS[-1]
    if wanted <= largest:
        return GpuMachineName(chip, next(count for count in GPU_COUNTS if count >= wanted), 1)
    has_network = chip.gpu is not None and chip.gpu.network_bytes_per_second is not None
    return GpuMachineName(chip, largest, min(-(-wanted // largest), LARGEST_NODES) if has_network else 1)


def _networked() -> str:
    return ", ".join(chip.name for chip in chips() if chip.gpu and chip.gpu.network_bytes_per_second is not None)


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _gpu(text: str) -> Chip | None:
    """Return the GPU of a name such as `h100`, `rtx4090` or `a100-80gb`, or None."""
    wanted = canonical_name(text)
    return next((chip for chip in chips() if chip.gpu and chip.name.lower() == wanted), None)


# The GPU of each family, by its name in gpus.csv. Machine types include their GPUs: a request does not name them.
FAMILIES = {
    "a2-highgpu": "A100-40",
    "a2-megagpu": "A100-40",
    "a2-ultragpu": "A100-80",
    "a3-highgpu": "H100",
    "a3-megagpu": "H100",
    "a3-edgegpu": "H100",
    "a3-ultragpu": "H200",
    "a4-highgpu": "B200",
}
_G2_GPUS = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}  # L4s, by the number of virtual CPUs
# The usual machine type for each number of GPUs. a3-highgpu has less network than a3-megagpu, but more zones.
_USUAL = {
    "A100-40": "a2-highgpu-{}g",
    "A100-80": "a2-ultragpu-{}g",
    "H100": "a3-highgpu-{}g",
    "H200": "a3-ultragpu-{}g",
    "B200": "a4-highgpu-{}g",
}
_USUAL_G2 = {1: "g2-standard-12", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"}
_ONLY_EIGHT = ("H200", "B200")


def gpus_of(machine_type: str) -> tuple[str, int] | None:
    """Return the GPU and the number of GPUs of a type such as `a3-highgpu-8g`, or None for other machines."""
    if found := re.fullmatch(r"g2-standard-(\d+)", machine_type):
        gpus = _G2_GPUS.get(int(found[1]))
        return ("L4", gpus) if gpus else None
    found = re.fullmatch(r"(a\d-[a-z]+)-(\d+)g", machine_type)
    if not found or found[1] not in FAMILIES or int(found[2]) not in (1, 2, 4, 8, 16):
        return None
    return FAMILIES[found[1]], int(found[2])


def usual_machine_type(gpu: str, gpus: int) -> str | None:
    """Return the usual machine type with that number of GPUs, or None if Google Cloud has none."""
    if gpu == "L4":
        return _USUAL_G2.get(gpus)
    if gpu not in _USUAL or (gpu in _ONLY_EIGHT and gpus != 8):
        return None
    return _USUAL[gpu].format(gpus)
