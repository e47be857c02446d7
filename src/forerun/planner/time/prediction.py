"""The predicted time of a scheduled program, on a TPU slice or on GPU machines."""

from __future__ import annotations

from forerun.hardware.chips import Chip
from forerun.planner.hlo import Module
from forerun.planner.time.execution import ProgramSimulation
from forerun.planner.time.gpu.gpu_step_time import gpu_simulation, gpu_step_time
from forerun.planner.time.step_time import StepTime
from forerun.planner.time.tpu_step_time import tpu_simulation, tpu_step_time


def step_time(
    scheduled: Module, chip: Chip, model_flops: float = 0.0, own_model: bool = False, devices_per_host: int = 8
) -> StepTime:
    """Return the predicted time of a scheduled program on one chip generation.

    Args:
        scheduled: The program of one device, as the compiler scheduled it.
        chip: The chip to predict for.
        model_flops: FLOPs of the model per device and step. They bound the time from below, too.
        own_model: Whether the model is a user's class, which no published run covers.
        devices_per_host: GPUs of one machine. Collectives between machines use the network. TPUs ignore it.
    """
    if chip.gpu is not None:
        return gpu_step_time(scheduled, chip, model_flops, own_model, devices_per_host)
    return tpu_step_time(scheduled, chip, model_flops, own_model)


def simulation_of(scheduled: Module, chip: Chip, devices_per_host: int = 8) -> ProgramSimulation:
    """Return the simulation that predicts the time of a scheduled program."""
    return gpu_simulation(scheduled, chip, devices_per_host) if chip.gpu else tpu_simulation(scheduled, chip)
