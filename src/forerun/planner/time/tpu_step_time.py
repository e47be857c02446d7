"""The time of one step on a TPU slice, from the program that the compiler scheduled for it.

The middle of the range is the simulated time, with the assumptions of `chip_model.py`. `tpu_range.py` has the range.
"""

from __future__ import annotations

from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.slice_network import SliceNetwork
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.simulated_step_time import Validation, simulated_step_time
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import StepTime
from forerun.planner.time.tpu_range import tpu_doubts, tpu_range

VALIDATION = Validation(chips=("v4", "v5e", "v5p", "v6e", "tpu7x"), range_of=tpu_range, doubts_of=tpu_doubts)


def tpu_step_time(scheduled: Module, slice: Slice, model_flops: float, own_model: bool) -> StepTime:
    """Return the predicted time of a program on a TPU slice. The arguments are those of `prediction.step_time`."""
    return simulated_step_time(tpu_simulation(scheduled, slice), slice.chip, model_flops, own_model, VALIDATION)


def tpu_simulation(scheduled: Module, slice: Slice) -> Simulation:
    """Return the simulation of a program on one device of a TPU slice."""
    machine = chip_model_of(slice.chip)
    network = SliceNetwork.of(slice, machine.host_bytes_per_second)
    return Simulation(scheduled, machine, slice.chip.name, Torus.of(slice), network)
