"""The predicted time of a scheduled program, on a TPU slice or on GPU machines.

The middle of the range is the simulated time, with the assumptions of `chip_model.py` and `gpu/gpu_model.py`.
"""

from __future__ import annotations

from forerun.hardware.chips import Chip
from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.slice_network import SliceNetwork
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.execution import ProgramSimulation
from forerun.planner.time.gpu.gpu_model import gpu_model_of
from forerun.planner.time.gpu.gpu_simulation import GpuSimulation
from forerun.planner.time.simulated_step_time import Validation, flat_range, simulated_step_time
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import StepTime
from forerun.planner.time.tpu_range import tpu_doubts, tpu_range

TPU_VALIDATION = Validation(chips=("v4", "v5e", "v5p", "v6e", "tpu7x"), range_of=tpu_range, doubts_of=tpu_doubts)
# Published / predicted seconds of the calibration half lay between 0.73 and 1.18 in 22 of 25 runs (bench/accuracy),
# rounded outward. The other three, at 0.57 to 0.61, have programs that differ much from the published ones.
GPU_LOW, GPU_HIGH = 0.70, 1.25
GPU_VALIDATION = Validation(("A100-40", "A100-80", "H100", "H200", "B200", "4090"), flat_range(GPU_LOW, GPU_HIGH))


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
    return simulated_step_time(tpu_simulation(scheduled, slice), slice.chip, model_flops, own_model, TPU_VALIDATION)


def gpu_step_time(
    scheduled: Module, chip: Chip, model_flops: float, own_model: bool, devices_per_host: int
) -> StepTime:
    """Return the predicted time of a program on GPUs. The arguments are those of `step_time`."""
    simulation = gpu_simulation(scheduled, chip, devices_per_host)
    links = "NVLink" if chip.gpu and chip.gpu.nvlink_bytes_per_second else "PCIe"
    return simulated_step_time(simulation, chip, model_flops, own_model, GPU_VALIDATION, links)


def simulation_of(scheduled: Module, slice: Slice) -> ProgramSimulation:
    """Return the simulation that predicts the time of a scheduled program."""
    if slice.chip.gpu is not None:
        return gpu_simulation(scheduled, slice.chip, slice.devices_per_host)
    return tpu_simulation(scheduled, slice)


def tpu_simulation(scheduled: Module, slice: Slice) -> Simulation:
    """Return the simulation of a program on one device of a TPU slice."""
    machine = chip_model_of(slice.chip)
    network = SliceNetwork.of(slice, machine.host_bytes_per_second)
    return Simulation(scheduled, machine, slice.chip.name, Torus.of(slice), network)


def gpu_simulation(scheduled: Module, chip: Chip, devices_per_host: int) -> GpuSimulation:
    """Return the simulation of a program on one GPU of a machine with `devices_per_host` GPUs."""
    return GpuSimulation(scheduled, gpu_model_of(chip, devices_per_host))
