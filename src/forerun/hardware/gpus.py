"""GPUs from the table `tables/gpus.csv`, and their description for XLA's GPU compiler."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.hardware.gpu_memory import memory_share
from forerun.hardware.rows import Row
from forerun.units import GIB, KIB, MIB

# The versions that are written into the description. They are those of the packages that the extra `cuda` installs.
CUDA_RUNTIME, CUDA_DRIVER, CUDNN = "13.0.0", "13.0.0", "9.12.0"


@dataclass(frozen=True)
class GpuSpecs:
    """Properties that only GPUs have. Rates are one way and per GPU; None means that no figure was found."""

    memory_bytes: int  # as the driver reports it
    fp16_flops: float | None
    fp8_flops: float | None
    nvlink_bytes_per_second: float | None  # None: the GPUs of a machine communicate over PCIe
    pcie_bytes_per_second: float
    network_bytes_per_second: float | None  # between machines
    gpus_per_host: int
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


def gpu_specs(row: Row) -> GpuSpecs:
    """Return the specs in a row of the table."""
    major, minor = row.text("compute_capability").split(".")
    return GpuSpecs(
        memory_bytes=int(float(row.text("memory_gib")) * GIB),
        fp16_flops=_scaled(row, "fp16_tflops", 1e12),
        fp8_flops=_scaled(row, "fp8_tflops", 1e12),
        nvlink_bytes_per_second=_scaled(row, "nvlink_gb_per_second", 1e9),
        pcie_bytes_per_second=float(row.text("pcie_gb_per_second")) * 1e9,
        network_bytes_per_second=_scaled(row, "network_gb_per_second", 1e9),
        gpus_per_host=int(row.text("gpus_per_host")),
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


def _scaled(row: Row, column: str, unit: float) -> float | None:
    value = row.number(column)
    return None if value is None else value * unit
