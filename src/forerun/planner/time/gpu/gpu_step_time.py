"""The time of one step on GPUs."""

from __future__ import annotations

from forerun.hardware.chips import Chip
from forerun.planner.hlo import Module
from forerun.planner.time.step_time import StepTime


def gpu_step_time(
    scheduled: Module, chip: Chip, model_flops: float, own_model: bool, devices_per_host: int
) -> StepTime:
    """Return the predicted time of a scheduled program on GPUs. The arguments are those of `prediction.step_time`."""
    del scheduled, own_model, devices_per_host
    peak = chip.bf16_flops or (chip.gpu.fp16_flops if chip.gpu else None) or 1e12
    least = model_flops / peak
    return StepTime(least / 0.5, {"matmul": least / 0.5}, least, ("not simulated yet",))
