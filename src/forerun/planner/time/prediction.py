"""The predicted time of a scheduled program, on a TPU slice or on GPU machines."""

from __future__ import annotations

from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.execution import ProgramSimulation
from forerun.planner.time.gpu.gpu_step_time import gpu_simulation, gpu_step_time
from forerun.planner.time.step_time import StepTime
from forerun.planner.time.tpu_step_time import tpu_simulation, tpu_step_time


def step_time(scheduled: Module, slice: Slice, model_flops: float = 0.0, own_model: bool = False) -> StepTime:
    """Return the predicted time of a scheduled program on a slice.

    Args:
        scheduled: The program of one device, as the compiler scheduled it.
        slice: The TPU slice or the GPU machines to predict for. Its topology decides the time of collectives.
        model_flops: FLOPs of the model per device and step. They bound the time from below, too.
        own_model: Whether the model is a user's class, which no published run covers.
    """
    if slice.chip.gpu is not None:
        return gpu_step_time(scheduled, slice.chip, model_flops, own_model, slice.devices_per_host)
    return tpu_step_time(scheduled, slice, model_flops, own_model)


def simulation_of(scheduled: Module, slice: Slice) -> ProgramSimulation:
    """Return the simulation that predicts the time of a scheduled program."""
    if slice.chip.gpu is not None:
        return gpu_simulation(scheduled, slice.chip, slice.devices_per_host)
    return tpu_simulation(scheduled, slice)
