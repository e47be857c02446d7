"""Assumptions of the step-time model about each chip, with their sources.

All rates are per JAX device. Data-sheet rates come from `hardware/`. This module has the shares of them that programs
reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.hardware.chips import Chip

LANES_PER_CYCLE = 4 * 1024  # of the vector unit, per core


@dataclass(frozen=True)
class ChipModel:
    """Rates and latencies of one JAX device, as the simulation uses them."""

    clock_hz: float
    matmul_flops: float  # FLOP/s of the data sheet
    matmul_share: float  # share of matmul_flops that large bf16 matmuls reach
    hbm_bytes_per_second: float  # achievable, not the data sheet's
    link_bytes_per_second: float  # one ICI link, one way
    host_bytes_per_second: float  # device <-> host memory, one way
    cores: int = 1  # TensorCores of the device
    matrix_unit: int = 128  # rows and columns of a matrix unit
    division_ops: float = 1.0  # operations of the vector unit for one division
    eight_bit_speed: float = 1.0  # of matmuls with operands of 8 bits, relative to bfloat16
    attention_share: float = 1.0  # speed of attention kernels relative to their counted cycles
    op_seconds: float = 0.4e-6  # overhead between two fusions
    dma_seconds: float = 0.3e-6  # latency of a copy between HBM and VMEM
    hop_seconds: float = 0.2e-6  # latency of a collective per link of its rings
    collective_seconds: float = 2e-6  # fixed latency of a collective
    offload_seconds: float = 13e-6  # fixed latency of a collective that a sparse core carries out

    @property
    def vector_ops_per_second(self) -> float:
        """Operations of the vector units, each for one element of 32 bits."""
        return self.cores * LANES_PER_CYCLE * self.clock_hz

    def with_shares(
        self, *, matmul: float = 1.0, hbm: float = 1.0, link: float = 1.0, host: float = 1.0, attention: float = 1.0
    ) -> ChipModel:
        """Return a copy scaled by calibration factors. A factor above one means faster than assumed."""
        return replace(
            self,
            matmul_share=self.matmul_share * matmul,
            hbm_bytes_per_second=self.hbm_bytes_per_second * hbm,
            link_bytes_per_second=self.link_bytes_per_second * link,
            host_bytes_per_second=self.host_bytes_per_second * host,
            attention_share=self.attention_share * attention,
        )


@dataclass(frozen=True)
class AchievableRates:
    """Achievable rates of a chip. `matmul` and `hbm` are shares of the data sheet's rates."""

    matmul: float
    hbm: float
    host_bytes_per_second: float
    clock_hz: float
    link_bytes_per_second: float


# Sources:
# - matmul: dumped VLIW code of v6e matmul fusions reaches 0.85 of peak on average, and its 8192 matmul microbenchmark
#   0.90. tpu7x: GEMM 0.83 and HBM 0.87 (tpu-recipes microbenchmarks).
# - HBM: a copy on v6e reaches 1360 of 1640 GB/s.
# - links: the JAX scaling book; v2 is assumed to equal v4.
# - host: PCIe of the scaling book (15 GB/s per chip, v6e 32); v6e is at 30 in simulated recipes.
REACHED = {
    "v2": AchievableRates(0.80, 0.85, 8e9, 0.70e9, 45e9),
    "v3": AchievableRates(0.80, 0.85, 8e9, 0.94e9, 100e9),
    "v4": AchievableRates(0.86, 0.90, 15e9, 1.05e9, 45e9),
    "v5e": AchievableRates(0.86, 0.92, 15e9, 1.50e9, 45e9),
    "v5p": AchievableRates(0.86, 0.90, 15e9, 1.75e9, 90e9),
    "v6e": AchievableRates(0.86, 0.83, 30e9, 1.75e9, 90e9),
    "tpu7x": AchievableRates(0.83, 0.87, 30e9, 1.90e9, 90e9),
}
# TensorCores of a device. jax's `pltpu.get_tpu_info_for_chip` has the same numbers.
CORES = {"v4": 2, "v5p": 2}
# Rows and columns of a matrix unit. Google Cloud's pages state 256 for v6e and tpu7x, and 128 for all before.
MATRIX_UNIT = {"v6e": 256, "tpu7x": 256}
# Operations of the vector unit for one division: v5e needs 3.6 cycles per 1,024 elements, v6e 0.8, with four operations
# per cycle (dumped code). v2 to v5p are assumed to equal v5e, and tpu7x to equal v6e (assumed, 2026-11).
DIVISION_OPS = {"v6e": 4.0, "tpu7x": 4.0}
SLOW_DIVISION_OPS = 14.0


# No factors from published step times are applied, unlike for GPUs: factors that were fitted to other families make the
# predictions of a family worse (bench/accuracy/calibrate.py, 2026-11-18: a median error of 11.0 % on the development
# runs, against 6.6 % without factors).


def chip_model_of(chip: Chip) -> ChipModel:
    """Return the model of one JAX device of `chip`."""
    reached = REACHED[chip.name]
    assert chip.bf16_flops_per_device
    assert chip.hbm_bytes_per_second
    return ChipModel(
        clock_hz=reached.clock_hz,
        matmul_flops=chip.bf16_flops_per_device,
        matmul_share=reached.matmul,
        hbm_bytes_per_second=chip.hbm_bytes_per_second / chip.devices_per_chip * reached.hbm,
        link_bytes_per_second=reached.link_bytes_per_second,
        host_bytes_per_second=reached.host_bytes_per_second,
        cores=CORES.get(chip.name, 1),
        matrix_unit=MATRIX_UNIT.get(chip.name, 128),
        eight_bit_speed=(chip.int8_ops or chip.bf16_flops_per_device * chip.devices_per_chip)
        / (chip.bf16_flops_per_device * chip.devices_per_chip),
        division_ops=DIVISION_OPS.get(chip.name, SLOW_DIVISION_OPS),
    )


def host_bytes_per_second(chip: Chip) -> float:
    """Return the bandwidth between one JAX device and the memory of its host, one way."""
    return chip.gpu.pcie_bytes_per_second if chip.gpu else chip_model_of(chip).host_bytes_per_second
