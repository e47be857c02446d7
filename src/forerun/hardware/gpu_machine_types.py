"""GPU machine types of Google Cloud: which GPU each has, and how many.

Source: the pages on accelerator-optimized machines at docs.cloud.google.com/compute, 2026-11.
"""

from __future__ import annotations

import re

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
