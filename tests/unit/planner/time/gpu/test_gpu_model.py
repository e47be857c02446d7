"""Assumptions and calibration factors of the GPU model."""

from __future__ import annotations

import pytest

from forerun.hardware.chips import chip_named, chips
from forerun.planner.time.gpu.gpu_model import CALIBRATED, RATES, assumed_gpu, gpu_model_of
from forerun.planner.time.prediction import GPU_VALIDATION

GPUS = [chip.name for chip in chips() if chip.gpu]


@pytest.mark.parametrize("name", GPUS)
def test_no_rate_is_above_the_data_sheet(name: str) -> None:
    chip = chip_named(name)
    model = gpu_model_of(chip, 8)
    assert chip.gpu is not None
    assert chip.hbm_bytes_per_second is not None
    assert chip.link_bytes_per_second is not None
    peak = chip.bf16_flops or chip.gpu.fp16_flops or 0.0
    assert 0.3 * peak <= model.gemm_flops <= peak
    assert model.attention_backward_flops <= model.attention_flops <= peak
    assert 0.8 * chip.hbm_bytes_per_second <= model.hbm_bytes_per_second <= chip.hbm_bytes_per_second
    assert model.link_bytes_per_second <= chip.link_bytes_per_second


def test_every_gpu_of_the_table_has_rates() -> None:
    assert set(GPUS) == set(RATES)
    assert set(CALIBRATED) <= set(RATES)
    assert set(GPU_VALIDATION.chips) <= set(CALIBRATED), "a compared GPU is calibrated"


def test_factors_above_one_are_faster() -> None:
    slow = assumed_gpu(chip_named("h100"), 8)
    fast = slow.with_shares(gemm=2, attention=3, hbm=4, link=5, overhead=6)
    assert fast.gemm_flops == 2 * slow.gemm_flops
    assert fast.attention_backward_flops == 3 * slow.attention_backward_flops
    assert fast.l2_bytes_per_second == 4 * slow.l2_bytes_per_second
    assert fast.network_bytes_per_second == 5 * slow.network_bytes_per_second
    assert fast.kernel_seconds == slow.kernel_seconds / 6
