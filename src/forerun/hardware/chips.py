"""Properties of chips: TPUs from the table `tables/chips.csv`, GPUs from `tables/gpus.csv`.

Also the description of a GPU for XLA's compiler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from forerun.errors import UserError, did_you_mean
from forerun.hardware.device_memory import memory_share
from forerun.hardware.rows import Row, shipped
from forerun.units import GIB, KIB, MIB


@dataclass(frozen=True)
class GpuSpecs:
    """Properties that only GPUs have. Rates are one way and per GPU; None means that no figure was found."""

    memory_bytes: int  # as the driver reports it
    fp16_flops: float | None
    fp8_flops: float | None
    nvlink_bytes_per_second: float | None  # None: the GPUs of a machine communicate over PCIe
    pcie_bytes_per_second: float
    network_bytes_per_second: float | None  # between machines
    compute_capability: tuple[int, int]
    has_accelerated_features: bool  # its code is compiled for this generation only (sm_90a)
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_hz: float
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    l2_bytes: int
    device_kinds: tuple[str, ...]

    @property
    def usable_bytes(self) -> int:
        """The memory that `train` reserves for arrays."""
        return int(self.memory_bytes * memory_share().share)


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
    return (*tpus, *(_chip(row, _gpu_specs(row)) for row in shipped("gpus.csv").rows))


def chip_named(name: str) -> Chip:
    """Return the chip of that name. `v5litepod` and marketing names such as `trillium` are accepted."""
    known = {chip.name.lower(): chip for chip in chips()}
    chip = known.get(canonical_name(name))
    if chip is not None:
        return chip
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


def _chip(row: Row, gpu: GpuSpecs | None = None) -> Chip:
    """Return the chip in a row of chips.csv, or with `gpu`, in a row of gpus.csv."""
    nvlink = gpu.nvlink_bytes_per_second if gpu else None
    vmem_mib = row.number("vmem_mib")
    return Chip(
        name=row.text("name"),
        bf16_flops=row.number("bf16_tflops", 1e12),
        int8_ops=row.number("int8_tops", 1e12),
        hbm_nominal_bytes=int(row.text("nominal_gb" if gpu else "hbm_nominal_gb")) * GIB,
        usable_bytes=gpu.usable_bytes if gpu else int(float(row.text("usable_gib_per_device")) * GIB),
        hbm_bytes_per_second=row.number("hbm_gb_per_second", 1e9),
        ici_bytes_per_second=row.number("ici_gb_per_second", 1e9) if nvlink is None else 2 * nvlink,
        link_bytes_per_second=nvlink or gpu.pcie_bytes_per_second if gpu else row.number("link_gb_per_second", 1e9),
        devices_per_chip=int(row.text("devices_per_chip") or 1),
        chips_per_host=int(row.text("gpus_per_host" if gpu else "chips_per_host") or 0) or None,
        vmem_bytes=None if vmem_mib is None else int(vmem_mib * MIB),
        clock_hz=row.number("clock_ghz", 1e9),
        source=row.text("source"),
        date=row.text("date"),
        gpu=gpu,
        eight_bits=("fp8" if gpu.fp8_flops else None) if gpu else row.text("eight_bit_format") or None,
    )


def _gpu_specs(row: Row) -> GpuSpecs:
    """Return the properties in a row of gpus.csv."""
    major, minor = row.text("compute_capability").split(".")
    return GpuSpecs(
        memory_bytes=int(float(row.text("memory_gib")) * GIB),
        fp16_flops=row.number("fp16_tflops", 1e12),
        fp8_flops=row.number("fp8_tflops", 1e12),
        nvlink_bytes_per_second=row.number("nvlink_gb_per_second", 1e9),
        pcie_bytes_per_second=float(row.text("pcie_gb_per_second")) * 1e9,
        network_bytes_per_second=row.number("network_gb_per_second", 1e9),
        compute_capability=(int(major), int(minor)),
        has_accelerated_features=row.text("accelerated") == "1",
        cores=int(row.text("cores")),
        fpus_per_core=int(row.text("fpus_per_core")),
        clock_hz=float(row.text("clock_ghz")) * 1e9,
        threads_per_core=int(row.text("threads_per_core")),
        shared_bytes_per_core=int(row.text("shared_kib_per_core")) * KIB,
        shared_bytes_per_block=int(row.text("shared_kib_per_block")) * KIB,
        l2_bytes=int(float(row.text("l2_mib")) * MIB),
        device_kinds=tuple(row.text("device_kinds").split("|")),
    )


# The versions that are written into the description. They are those of the packages that the extra `cuda` installs.
CUDA_RUNTIME, CUDA_DRIVER, CUDNN = "13.0.0", "13.0.0", "9.12.0"


def target_description(specs: GpuSpecs, hbm_bytes_per_second: float) -> str:
    """Return the description of a GPU that XLA's compiler needs, as a text-format `GpuTargetConfigProto`."""
    major, minor = specs.compute_capability
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": specs.shared_bytes_per_core,
        "threads_per_core_limit": specs.threads_per_core,
        "core_count": specs.cores,
        "fpus_per_core": specs.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(hbm_bytes_per_second),
        "l2_cache_size": specs.l2_bytes,
        "clock_rate_ghz": specs.clock_hz / 1e9,
        "device_memory_size": specs.memory_bytes,
        "shared_memory_per_block_optin": specs.shared_bytes_per_block,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    lines = [f"  {name}: {value}" for name, value in device.items()]
    features = " feature_extension: ACCELERATED_FEATURES" if specs.has_accelerated_features else ""
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}")
    versions = {"runtime_version": CUDA_RUNTIME, "driver_version": CUDA_DRIVER, "dnn_version": CUDNN}
    lines += [f'  {name}: "{value}"' for name, value in versions.items()]
    kind = specs.device_kinds[0]
    text = "\n".join(lines)
    return f'gpu_device_info {{\n{text}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{kind}"\n'
