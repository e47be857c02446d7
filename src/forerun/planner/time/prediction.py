"""The predicted time of a scheduled program, on a TPU slice or on GPU machines.

The middle of the range is the simulated time, with the assumptions of `chip_model.py` and `gpu/gpu_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from forerun.hardware.chips import Chip
from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.slice_network import SliceNetwork
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.execution import ProgramSimulation, Spent
from forerun.planner.time.gpu.gpu_model import gpu_model_of
from forerun.planner.time.gpu.gpu_simulation import GpuSimulation
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import (
    GUESSED_LOOP,
    LIMITS,
    OWN_MODEL,
    ROOFLINE,
    SHORT,
    SHORTEST_SECONDS,
    UNKNOWN_CHIP,
    UNKNOWN_KERNEL,
    StepTime,
    TimeRange,
)
from forerun.planner.time.tpu_range import tpu_doubts, tpu_range

# The simulation's kinds of time, and the part of a step that each is reported as.
WORDS = {
    "matmul": "matmul",
    "attention": "attention",
    "kernels": "attention",
    "collectives": "collectives not hidden",
    "network": "network not hidden",
    "host": "host transfers not hidden",
    "memory": "memory-bound rest",
    "dma": "memory-bound rest",
}
# Returns the range of a step from its simulation, its predicted seconds and its doubts.
RangeOf = Callable[[ProgramSimulation, float, Collection[str]], TimeRange]
# Returns doubts that only one platform has, from the simulation of a step and its predicted seconds.
DoubtsOf = Callable[[ProgramSimulation, float], Collection[str]]


def flat_range(low: float, high: float) -> RangeOf:
    """Return a function that gives every step the same range."""
    return lambda simulation, seconds, doubts: TimeRange(low, high)


@dataclass(frozen=True)
class Validation:
    """What the comparison with published runs covers on one platform, and the range that it found."""

    chips: tuple[str, ...]  # chips with at least one published run
    range_of: RangeOf
    doubts_of: DoubtsOf = lambda simulation, seconds: ()


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


def simulated_step_time(
    simulation: ProgramSimulation,
    chip: Chip,
    model_flops: float,
    own_model: bool,
    validation: Validation,
    links: str = "ICI",
) -> StepTime:
    """Run a simulation and return the predicted time of a step.

    Args:
        simulation: The program of one device and the model of the device.
        chip: The chip, whose peak rates bound the time from below.
        model_flops: FLOPs of the model per device and step. They bound the time from below, too.
        own_model: Whether the model is a user's class, which no published run covers.
        validation: The chips and the range of the published runs.
        links: The name of the links between the devices.

    Returns:
        The time with its parts. If the simulated time is below the floor, the floor replaces it.
    """
    spent = simulation.run()
    roof = PeakRates.of(chip)
    floor, model_seconds = time_floor(simulation.module, roof), model_flops / roof.flops
    least = max(floor.seconds, model_seconds)
    possible = [
        (chip.name not in validation.chips, UNKNOWN_CHIP),
        (own_model, OWN_MODEL),
        (max(spent.seconds, least) < SHORTEST_SECONDS, SHORT),
        (bool(simulation.guessed_loops), GUESSED_LOOP),
        (spent.by_kind["kernels"] > 0, UNKNOWN_KERNEL),
        (spent.seconds < least, ROOFLINE),
    ]
    doubts = tuple(text for holds, text in possible if holds)
    doubts += tuple(validation.doubts_of(simulation, max(spent.seconds, least)))
    time_range = validation.range_of(simulation, max(spent.seconds, least), doubts)
    parts = _reported_parts(spent)
    if spent.seconds < least:
        # Add the difference to the part that bounds the floor, so that the parts still add up to the total.
        part = "memory-bound rest" if floor.seconds >= model_seconds and floor.memory > floor.compute else "matmul"
        parts[part] = parts.get(part, 0.0) + least - spent.seconds
    return StepTime(
        mid_seconds=max(spent.seconds, least),
        parts_seconds=parts,
        floor_seconds=least,
        doubts=doubts,
        low_factor=time_range.low_factor,
        high_factor=time_range.high_factor,
        range_reasons=time_range.reasons,
        links=links,
    )


def _reported_parts(spent: Spent) -> dict[str, float]:
    """Return the seconds of each reported part, without parts of zero seconds."""
    parts = dict.fromkeys(LIMITS, 0.0)
    for kind, seconds in spent.by_kind.items():
        parts[WORDS[kind]] += seconds
    return {part: seconds for part, seconds in parts.items() if seconds}
