"""Assumptions of the step-time model about each GPU, with their sources.

Data-sheet rates come from `hardware/tables/gpus.csv`. This module has the shares of them that programs reach. No number
here was measured by this project: it has no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.hardware.chips import Chip


@dataclass(frozen=True)
class GpuRates:
    """Achievable rates of one GPU generation. Shares are relative to the data sheet."""

    gemm: float  # large bf16 gemms, before losses by tiles, waves and short K
    hbm: float  # large copies
    attention: float  # forward flash attention, heads of 128, long sequences
    attention_backward: float
    tile: tuple[int, int]  # largest tile of cuBLAS gemms
    ring: float  # bus bandwidth of NCCL's ring: a share of the links' rate
    nvls: float = 0.0  # bus bandwidth of an all-reduce with NVLink SHARP; 0: not available
    l2_speedup: float = 2.0  # rate of data that stays in the L2 cache, relative to HBM


# Sources of `gemm`:
# - H100 and H200: 720 TFLOP/s (0.73) with shapes of language models (SemiAnalysis, MI300X vs H100 vs H200, 2024-12),
#   794 (0.80) at the best shape (stas00/ml-engineering, compute/accelerator, MAMF table).
# - A100: 268 (0.86) at the best shape (the same table).
# - B200: 1745 (0.78) at the best shape (the same table), 1672 (0.74) at 8192^3, 1448 to 1562 with shapes of Llama 7B
#   (arXiv 2604.23466, tables III and IV).
# - Ada, consumer Blackwell and Turing: assumed, 2026-11. L4 and T4 have a power limit of 72 W and 70 W.
# Sources of `attention`:
# - H100: cuDNN in figures 5 and 6 of the FlashAttention-3 paper (arXiv 2407.08608): 595 to 617 forward, heads of 128.
# - A100: FlashAttention-2 paper (arXiv 2307.08691), figures 4 to 6: 180 to 225 forward, 150 to 196 backward.
# - Others: assumed with the same shares, 2026-11.
# Sources of `hbm`: a copy of 4 GiB reaches 0.906 on a GPU of the Hopper generation; others: assumed, 2026-11.
# Sources of `ring` and `nvls`: nccl-tests on 8 GPUs. H100: 476 GB/s for an all-reduce with NVLS (nccl-tests issue 290).
# GB200: 835 GB/s (coreweave/nccl-tests pull request 43). Rings: 0.80 of NVLink, assumed, 2026-11. PCIe: 20 GB/s between
# GPUs of one socket and less across sockets (nccl-tests issue 178). GeForce GPUs have no peer-to-peer copies.
RATES = {
    "H100": GpuRates(0.79, 0.90, 0.62, 0.52, (128, 256), 0.80, 1.06, 1.6),
    "H100-PCIe": GpuRates(0.70, 0.90, 0.55, 0.46, (128, 256), 0.35, 0.0, 2.0),
    "H200": GpuRates(0.79, 0.90, 0.62, 0.52, (128, 256), 0.80, 1.06, 1.3),
    "B200": GpuRates(0.79, 0.90, 0.62, 0.48, (128, 256), 0.75, 0.93, 1.3),
    "A100-40": GpuRates(0.87, 0.90, 0.70, 0.60, (128, 256), 0.78, 0.0, 2.5),
    "A100-80": GpuRates(0.87, 0.88, 0.70, 0.60, (128, 256), 0.78, 0.0, 2.0),
    "L40S": GpuRates(0.65, 0.88, 0.50, 0.42, (128, 128), 0.50, 0.0, 3.0),
    "L4": GpuRates(0.50, 0.88, 0.42, 0.36, (128, 128), 0.40, 0.0, 3.0),
    "4090": GpuRates(0.93, 0.92, 0.85, 0.70, (128, 128), 0.25, 0.0, 3.0),
    "5090": GpuRates(0.93, 0.92, 0.85, 0.70, (128, 128), 0.25, 0.0, 3.0),
    "T4": GpuRates(0.50, 0.85, 0.40, 0.33, (128, 128), 0.50, 0.0, 3.0),
}
OTHER = GpuRates(0.70, 0.88, 0.55, 0.45, (128, 128), 0.60)  # a GPU that a user adds to the table

# Factors for the assumptions above (above one: faster), fitted to published step times with
# bench/accuracy/gpu_calibrate.py on the calibration half, 2026-11-18. They also contain losses that the model
# does not know, such as lower clocks at the power limit. A factor is limited where a rate would exceed what any
# microbenchmark reaches.
_AMPERE = {"gemm": 0.866, "attention": 1.004, "hbm": 1.043, "link": 0.919, "overhead": 1.012}  # 6 runs
_HOPPER = {"gemm": 0.763, "attention": 0.967, "hbm": 1.044, "link": 0.991, "overhead": 1.11}  # 13 runs
# 2 runs of one family each. The fit gives 1.18 and 1.23 for gemms, which is above all microbenchmarks.
_BLACKWELL = {"gemm": 1.025, "attention": 1.034, "hbm": 1.044, "link": 1.101, "overhead": 1.038}
_ADA = {"gemm": 1.075, "attention": 1.057, "hbm": 1.022, "link": 1.389, "overhead": 1.054}
CALIBRATED: dict[str, dict[str, float]] = {
    "A100-40": _AMPERE,
    "A100-80": _AMPERE,
    "H100": _HOPPER,
    "H100-PCIe": _HOPPER,
    "H200": _HOPPER,
    "B200": _BLACKWELL,
    "4090": _ADA,
}


@dataclass(frozen=True)
class GpuModel:
    """Rates and latencies of one GPU and its connections, as the simulation uses them."""

    gemm_flops: float  # FLOP/s of large 16-bit gemms
    fp8_flops: float  # of large 8-bit gemms
    fp32_flops: float  # of gemms of float32, which XLA runs as TF32
    attention_flops: float
    attention_backward_flops: float
    hbm_bytes_per_second: float
    l2_bytes: float
    l2_bytes_per_second: float
    cores: int
    tile: tuple[int, int]
    link_bytes_per_second: float  # bus bandwidth of rings within a machine
    nvls_bytes_per_second: float  # bus bandwidth of an all-reduce within a machine; 0: not available
    network_bytes_per_second: float  # per GPU, between machines
    host_bytes_per_second: float
    devices_per_host: int = 8
    kernel_seconds: float = 2e-6  # start and end of a kernel in a CUDA graph
    loop_seconds: float = 5e-6  # start of one iteration of a loop by the host
    collective_seconds: float = 15e-6  # latency of a collective with the LL protocol
    bulk_collective_seconds: float = 40e-6  # latency with the Simple protocol, which has the full bandwidth
    latency_protocol_share: float = 0.25  # bandwidth of the LL protocol relative to the Simple protocol
    node_seconds: float = 5e-6  # latency of a collective per machine
    copy_seconds: float = 5e-6  # latency of a copy from or to the host
    # NCCL runs on up to 24 of the SMs and uses memory bandwidth, so other kernels are slower while it is active.
    slowdown: float = 0.10

    def with_shares(
        self,
        *,
        gemm: float = 1.0,
        attention: float = 1.0,
        hbm: float = 1.0,
        link: float = 1.0,
        overhead: float = 1.0,
    ) -> GpuModel:
        """Return a copy scaled by calibration factors. A factor above one means faster than assumed."""
        return replace(
            self,
            gemm_flops=self.gemm_flops * gemm,
            fp8_flops=self.fp8_flops * gemm,
            fp32_flops=self.fp32_flops * gemm,
            attention_flops=self.attention_flops * attention,
            attention_backward_flops=self.attention_backward_flops * attention,
            hbm_bytes_per_second=self.hbm_bytes_per_second * hbm,
            l2_bytes_per_second=self.l2_bytes_per_second * hbm,
            link_bytes_per_second=self.link_bytes_per_second * link,
            nvls_bytes_per_second=self.nvls_bytes_per_second * link,
            network_bytes_per_second=self.network_bytes_per_second * link,
            kernel_seconds=self.kernel_seconds / overhead,
        )


NETWORK_SHARE = 0.93  # 46 to 48 GB/s of a 400 Gb/s adapter (nccl-tests issue 290)
HOST_SHARE = 0.80  # of PCIe; pinned memory, assumed, 2026-11
SLOWEST_NETWORK = 12.5e9  # bytes per second of a machine without a known network: 100 Gb/s, assumed, 2026-11
TF32_SHARE = 0.5  # TF32 runs at half of the rate of bf16


def gpu_model_of(chip: Chip, devices_per_host: int) -> GpuModel:
    """Return the calibrated model of one GPU of a machine with `devices_per_host` GPUs."""
    return assumed_gpu(chip, devices_per_host).with_shares(**CALIBRATED.get(chip.name, {}))


def assumed_gpu(chip: Chip, devices_per_host: int) -> GpuModel:
    """Return the model of one GPU before calibration."""
    specs, rates = chip.gpu, RATES.get(chip.name, OTHER)
    assert specs is not None
    assert chip.hbm_bytes_per_second
    assert chip.link_bytes_per_second
    peak = peak_flops(chip)
    hbm = chip.hbm_bytes_per_second * rates.hbm
    network = specs.network_bytes_per_second or SLOWEST_NETWORK / devices_per_host
    return GpuModel(
        gemm_flops=peak * rates.gemm,
        fp8_flops=(specs.fp8_flops or peak) * rates.gemm,
        fp32_flops=peak * rates.gemm * TF32_SHARE,
        attention_flops=peak * rates.attention,
        attention_backward_flops=peak * rates.attention_backward,
        hbm_bytes_per_second=hbm,
        l2_bytes=specs.l2_bytes,
        l2_bytes_per_second=hbm * rates.l2_speedup,
        cores=specs.cores,
        tile=rates.tile,
        link_bytes_per_second=chip.link_bytes_per_second * rates.ring,
        nvls_bytes_per_second=chip.link_bytes_per_second * rates.nvls,
        network_bytes_per_second=network * NETWORK_SHARE,
        host_bytes_per_second=specs.pcie_bytes_per_second * HOST_SHARE,
        devices_per_host=devices_per_host,
    )


def peak_flops(chip: Chip) -> float:
    """Return the peak FLOP/s of 16-bit operands. A GPU without bf16 units (T4) uses those for fp16."""
    peak = chip.bf16_flops or (chip.gpu.fp16_flops if chip.gpu else None)
    assert peak
    return peak
