"""Properties of chips: TPUs from the table `tables/chips.csv`, GPUs from `tables/gpus.csv`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from forerun.errors import UserError, did_you_mean
from forerun.hardware.gpus import GpuSpecs, gpu_specs
from forerun.hardware.rows import Row, shipped
from forerun.units import GIB, MIB


@dataclass(frozen=True)
class Chip:
    """One chip. None means that no figure was found, never zero.

    Rates are those of the data sheet, for the complete chip. `usable_bytes` is the HBM that a program can use on one
    JAX device: for a TPU the limit of its compiler, for a GPU the part that `train` reserves. `ici_bytes_per_second` is
    both ways over all links of the chip. `link_bytes_per_second` is one way, for a TPU over one link, for a GPU over
    all links to the other GPUs of its machine.
    """

    name: str
    bf16_flops: float | None
    int8_ops: float | None
    hbm_nominal_bytes: int
    usable_bytes: int
    hbm_bytes_per_second: float | None
    ici_bytes_per_second: float | None
    link_bytes_per_second: float | None
    devices_per_chip: int
    chips_per_host: int | None
    vmem_bytes: int | None
    clock_hz: float | None
    source: str
    date: str
    gpu: GpuSpecs | None = None  # None: a TPU
    eight_bits: str | None = None  # int8 or fp8: operands that it multiplies faster than bfloat16 in training

    @property
    def bf16_flops_per_device(self) -> float | None:
        """Peak FLOP/s of one JAX device: the chip's peak divided by its number of devices."""
        return None if self.bf16_flops is None else self.bf16_flops / self.devices_per_chip

    @property
    def is_tpu(self) -> bool:
        return self.gpu is None

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        """The platform of its devices, as jax names it."""
        return "tpu" if self.gpu is None else "gpu"


@cache
def chips() -> tuple[Chip, ...]:
    """Return all chips of the table, TPUs first."""
    tpus = (_chip(row) for row in shipped("chips.csv").rows)
    return (*tpus, *(_gpu_chip(row) for row in shipped("gpus.csv").rows))


def chip_named(name: str) -> Chip:
    """Return the chip of that name. `v5litepod` and marketing names such as `trillium` are accepted."""
    known = {chip.name.lower(): chip for chip in chips()}
    wanted = canonical_name(name)
    if wanted.lower() in known:
        return known[wanted.lower()]
    near = did_you_mean(name.lower(), known)
    raise UserError(
        "E-HARDWARE-001",
        f"no chip is called {name!r}" + (f": did you mean {known[near].name}?" if near else ""),
        why=f"known chips: {', '.join(chip.name for chip in chips())}",
        fix="forerun hardware chips",
    )


_OTHER_NAMES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "trillium": "v6e",
    "v6lite": "v6e",
    "ironwood": "tpu7x",
    "v7x": "tpu7x",
    "tpu-v7x": "tpu7x",
}


def canonical_name(generation: str) -> str:
    """Return the canonical spelling of a chip: `v5litepod` and `V5E` become `v5e`, `RTX4090` becomes `4090`."""
    plain = generation.strip().lower()
    if plain in _OTHER_NAMES:
        return _OTHER_NAMES[plain]
    gpu = re.sub(r"^(nvidia-)?(geforce-|tesla-)?(rtx-?(?=[45]090))?", "", plain.replace(" ", "-"))
    gpu = re.sub(r"-(sxm\d?|hbm3e?)(?=-|$)", "", gpu)
    gpu = re.sub(r"(?<=\d)gb?$", "", gpu)
    return {"h100-80": "h100", "h200-141": "h200", "b200-180": "b200"}.get(gpu, gpu)


def require_compute_dtype(chip: Chip, dtype: str) -> None:
    """Raise an error if the chip has no matrix unit for the dtype of a job's matrix multiplications."""
    if dtype == "bfloat16" and chip.gpu and chip.bf16_flops is None:
        raise UserError(
            "E-HARDWARE-023",
            f"{chip.name} cannot compute with bfloat16",
            why="GPUs before compute capability 8.0 have no bfloat16 matrix unit; XLA would convert to float32",
            fix="precision.compute=float32, which is slow on this GPU, or a newer GPU such as l4-1",
        )


def require_matmul(chip: Chip, kind: str | None) -> None:
    """Raise an error if the chip does not multiply operands of a job's `precision.matmul` faster than bfloat16."""
    if kind is None or kind == chip.eight_bits:
        return
    if chip.eight_bits is None:
        why = f"it multiplies operands of 8 bits no faster than {'bfloat16' if chip.bf16_flops else 'float32'}"
        fix = "remove precision.matmul"
    elif chip.is_tpu:
        why = f"the 8-bit operands of its matrix units are {chip.eight_bits}"
        fix = f"precision.matmul={chip.eight_bits}, or remove precision.matmul"
    else:
        why = "forerun multiplies 8-bit operands in fp8 on GPUs, which keeps the range of gradients"
        fix = "precision.matmul=fp8, or remove precision.matmul"
    raise UserError("E-HARDWARE-120", f"{chip.name} does not train with {kind} products", why=why, fix=fix)


# Values of jax's `device.device_kind`. For each TPU, the name that this jax version uses comes first.
# Those of GPUs are in the table.
_DEVICE_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def chip_of_device_kind(kind: str) -> Chip | None:
    """Return the chip of a jax `device.device_kind`, or None for an unknown chip. MFU is then unknown, too."""
    name = _DEVICE_KINDS.get(kind.strip())
    if name:
        return chip_named(name)
    return next((chip for chip in chips() if chip.gpu and kind.strip() in chip.gpu.device_kinds), None)


def device_kind_of(chip: Chip) -> str | None:
    """Return the `device.device_kind` that jax uses for the devices of a chip, or None if it is unknown."""
    if chip.gpu:
        return chip.gpu.device_kinds[0]
    return next((kind for kind, name in _DEVICE_KINDS.items() if name == chip.name), None)


def _chip(row: Row) -> Chip:
    return Chip(
        name=row.text("name"),
        bf16_flops=_scaled(row, "bf16_tflops", 1e12),
        int8_ops=_scaled(row, "int8_tops", 1e12),
        hbm_nominal_bytes=int(row.text("hbm_nominal_gb")) * GIB,
        usable_bytes=int(float(row.text("usable_gib_per_device")) * GIB),
        hbm_bytes_per_second=_scaled(row, "hbm_gb_per_second", 1e9),
        ici_bytes_per_second=_scaled(row, "ici_gb_per_second", 1e9),
        link_bytes_per_second=_scaled(row, "link_gb_per_second", 1e9),
        devices_per_chip=int(row.text("devices_per_chip")),
        chips_per_host=row.integer("chips_per_host"),
        vmem_bytes=_whole(row, "vmem_mib", MIB),
        clock_hz=_scaled(row, "clock_ghz", 1e9),
        source=row.text("source"),
        date=row.text("date"),
        eight_bits=row.text("eight_bit_format") or None,
    )


def _gpu_chip(row: Row) -> Chip:
    specs = gpu_specs(row)
    link = specs.nvlink_bytes_per_second or specs.pcie_bytes_per_second
    return Chip(
        name=row.text("name"),
        bf16_flops=_scaled(row, "bf16_tflops", 1e12),
        int8_ops=_scaled(row, "int8_tops", 1e12),
        hbm_nominal_bytes=int(row.text("nominal_gb")) * GIB,
        usable_bytes=specs.usable_bytes,
        hbm_bytes_per_second=_scaled(row, "hbm_gb_per_second", 1e9),
        ici_bytes_per_second=None if specs.nvlink_bytes_per_second is None else 2 * specs.nvlink_bytes_per_second,
        link_bytes_per_second=link,
        devices_per_chip=1,
        chips_per_host=specs.gpus_per_host,
        vmem_bytes=None,
        clock_hz=specs.clock_hz,
        source=row.text("source"),
        date=row.text("date"),
        gpu=specs,
        eight_bits="fp8" if specs.fp8_flops else None,
    )


def _scaled(row: Row, column: str, unit: float) -> float | None:
    value = row.number(column)
    return None if value is None else value * unit


def _whole(row: Row, column: str, unit: int) -> int | None:
    value = row.number(column)
    return None if value is None else int(value * unit)
