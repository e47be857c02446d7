"""Properties of chips, from the table `tables/chips.csv`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from forerun.errors import UserError, did_you_mean
from forerun.hardware.rows import Row, shipped
from forerun.units import GIB, MIB


@dataclass(frozen=True)
class Chip:
    """One chip. None means that no figure was found, never zero.

    Rates are those of the data sheet, for the complete chip. `usable_bytes` is the HBM that the TPU compiler can use on
    one JAX device. `ici_bytes_per_second` is both ways over all links of the chip, `link_bytes_per_second` one way over
    one link.
    """

    name: str
    bf16_flops: float | None
    int8_ops: float | None
    hbm_nominal_bytes: int
    usable_bytes: int | None
    hbm_bytes_per_second: float | None
    ici_bytes_per_second: float | None
    link_bytes_per_second: float | None
    devices_per_chip: int
    chips_per_host: int | None
    vmem_bytes: int | None
    clock_hz: float | None
    source: str
    date: str

    @property
    def bf16_flops_per_device(self) -> float | None:
        """Peak FLOP/s of one JAX device: the chip's peak divided by its number of devices."""
        return None if self.bf16_flops is None else self.bf16_flops / self.devices_per_chip

    @property
    def is_tpu(self) -> bool:
        return self.usable_bytes is not None


@cache
def chips() -> tuple[Chip, ...]:
    """Return all chips of the table, TPUs first."""
    return tuple(_chip(row) for row in shipped("chips.csv").rows)


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
    """Return the canonical spelling of a generation: `v5litepod` and `V5E` become `v5e`."""
    plain = generation.strip().lower()
    return _OTHER_NAMES.get(plain, plain)


# Values of jax's `device.device_kind`. For each TPU, the name that this jax version uses comes first.
# H100 PCIe and H200 have no entry: they differ from the H100 SXM of the table.
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
    "Tesla T4": "T4",
    "NVIDIA T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-PCIE-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
}


def chip_of_device_kind(kind: str) -> Chip | None:
    """Return the chip of a jax `device.device_kind`, or None for an unknown chip. MFU is then unknown, too."""
    name = _DEVICE_KINDS.get(kind.strip())
    return chip_named(name) if name else None


def device_kind_of(chip: Chip) -> str | None:
    """Return the `device.device_kind` that jax uses for the devices of a chip, or None if it is unknown."""
    return next((kind for kind, name in _DEVICE_KINDS.items() if name == chip.name), None)


def _chip(row: Row) -> Chip:
    return Chip(
        name=row.text("name"),
        bf16_flops=_scaled(row, "bf16_tflops", 1e12),
        int8_ops=_scaled(row, "int8_tops", 1e12),
        hbm_nominal_bytes=int(row.text("hbm_nominal_gb")) * GIB,
        usable_bytes=_whole(row, "usable_gib_per_device", GIB),
        hbm_bytes_per_second=_scaled(row, "hbm_gb_per_second", 1e9),
        ici_bytes_per_second=_scaled(row, "ici_gb_per_second", 1e9),
        link_bytes_per_second=_scaled(row, "link_gb_per_second", 1e9),
        devices_per_chip=int(row.text("devices_per_chip")),
        chips_per_host=row.integer("chips_per_host"),
        vmem_bytes=_whole(row, "vmem_mib", MIB),
        clock_hz=_scaled(row, "clock_ghz", 1e9),
        source=row.text("source"),
        date=row.text("date"),
    )


def _scaled(row: Row, column: str, unit: float) -> float | None:
    value = row.number(column)
    return None if value is None else value * unit


def _whole(row: Row, column: str, unit: int) -> int | None:
    value = row.number(column)
    return None if value is None else int(value * unit)
