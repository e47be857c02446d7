"""The time of one step on a TPU slice, from the program that the compiler scheduled for it.

The middle of the range is the simulated time, with the assumptions of `chip_model.py`.
"""

from __future__ import annotations

from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.simulated_step_time import Validation, simulated_step_time
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import StepTime
from forerun.planner.time.torus import Torus

# Published / predicted seconds of the calibration half lay between 0.75 and 1.21 (bench/accuracy), rounded outward.
LOW, HIGH = 0.75, 1.25
VALIDATION = Validation(chips=("v4", "v5e", "v5p", "v6e", "tpu7x"), low=LOW, high=HIGH)


def tpu_step_time(scheduled: Module, slice: Slice, model_flops: float, own_model: bool) -> StepTime:
    """Return the predicted time of a program on a TPU slice. The arguments are those of `prediction.step_time`."""
    return simulated_step_time(tpu_simulation(scheduled, slice), slice.chip, model_flops, own_model, VALIDATION)


def tpu_simulation(scheduled: Module, slice: Slice) -> Simulation:
    """Return the simulation of a program on one device of a TPU slice."""
    return Simulation(scheduled, chip_model_of(slice.chip), slice.chip.name, Torus.of(slice))
