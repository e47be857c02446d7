"""What the step-time model assumes of each chip. One table, each figure with where it comes from.

Per JAX device. Data-sheet figures come from `hardware/`; the shares of them that programs reach are here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.hardware.chips import Chip


@dataclass(frozen=True)
class Machine:
    clock_hz: float
    matmul_flops: float  # data sheet
    matmul_share: float  # of it, that large bf16 matmuls reach
    hbm_bytes_per_second: float  # as reached
    link_bytes_per_second: float  # one ICI link, one way
    host_bytes_per_second: float  # device <-> host memory, one way
    attention_share: float = 1.0  # of the speed that attention's counted cycles give
    op_seconds: float = 0.4e-6  # between two fusions
    dma_seconds: float = 0.3e-6
    hop_seconds: float = 0.5e-6  # a collective's latency per device of its ring
    collective_seconds: float = 2e-6

    def with_shares(
        self, *, matmul: float = 1.0, hbm: float = 1.0, link: float = 1.0, host: float = 1.0, attention: float = 1.0
    ) -> Machine:
        """Scaled by calibration factors: above one is faster than assumed."""
        return replace(
            self,
            matmul_share=self.matmul_share * matmul,
            hbm_bytes_per_second=self.hbm_bytes_per_second * hbm,
            link_bytes_per_second=self.link_bytes_per_second * link,
            host_bytes_per_second=self.host_bytes_per_second * host,
            attention_share=self.attention_share * attention,
        )


@dataclass(frozen=True)
class Reached:
    """Shares of the data sheet."""

    matmul: float
    hbm: float
    host_bytes_per_second: float
    clock_hz: float
    link_bytes_per_second: float


# matmul: dumped VLIW code of v6e matmul fusions reaches 0.85 of peak on average, and its 8192 matmul microbenchmark
# 0.90; tpu7x GEMM 0.83 and HBM 0.87 (tpu-recipes microbenchmarks); HBM copy on v6e 1360 of 1640 GB/s. Links: the JAX
# scaling book, v2 as v4. Host: PCIe of the scaling book (15 GB/s a chip, v6e 32), v6e at 30 in simulated recipes.
REACHED = {
    "v2": Reached(0.80, 0.85, 8e9, 0.70e9, 45e9),
    "v3": Reached(0.80, 0.85, 8e9, 0.94e9, 100e9),
    "v4": Reached(0.86, 0.90, 15e9, 1.05e9, 45e9),
    "v5e": Reached(0.86, 0.92, 15e9, 1.50e9, 45e9),
    "v5p": Reached(0.86, 0.90, 15e9, 1.75e9, 90e9),
    "v6e": Reached(0.86, 0.90, 30e9, 1.75e9, 90e9),
    "tpu7x": Reached(0.83, 0.87, 30e9, 1.90e9, 100e9),
}


# How much faster (above one) the parts are than assumed above, from published step times: bench/accuracy/calibrate.py
# on the calibration half, 2026-11-15. A generation with fewer than three runs there stays as assumed.
CALIBRATED: dict[str, dict[str, float]] = {
    # 5 runs, tensor parallel. The fit wants 1.107 for the matmuls; bounded at 0.90 of peak, the best that any
    # microbenchmark shows of a TPU (hardware facts: v6e, 8192 x 8192).
    "v5p": {"matmul": 1.046, "hbm": 1.048, "link": 1.152, "attention": 1.026},
    "v6e": {"matmul": 1.012, "hbm": 1.009, "link": 1.01, "host": 1.095, "attention": 1.031},  # 6 runs, FSDP, offload
}


def machine_of(chip: Chip) -> Machine:
    """One JAX device of this chip, calibrated."""
    return assumed(chip).with_shares(**CALIBRATED.get(chip.name, {}))


def assumed(chip: Chip) -> Machine:
    """One JAX device of this chip before calibration."""
    reached = REACHED[chip.name]
    assert chip.bf16_flops_per_device
    assert chip.hbm_bytes_per_second
    return Machine(
        clock_hz=reached.clock_hz,
        matmul_flops=chip.bf16_flops_per_device,
        matmul_share=reached.matmul,
        hbm_bytes_per_second=chip.hbm_bytes_per_second / chip.devices_per_chip * reached.hbm,
        link_bytes_per_second=reached.link_bytes_per_second,
        host_bytes_per_second=reached.host_bytes_per_second,
    )
