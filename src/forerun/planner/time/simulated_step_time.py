"""The predicted time of a step from a simulation: its parts, its lower bound, and reasons to doubt it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from forerun.hardware.chips import Chip
from forerun.planner.time.execution import ProgramSimulation, Spent
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.step_time import LIMITS, StepTime
from forerun.planner.time.uncertainty import TimeRange

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
# The range holds only for cases that the published runs of docs/explanation/accuracy.md cover. Others get one of these
# doubts.
SHORTEST_SECONDS = 0.1
UNKNOWN_CHIP = "no published run on this generation was compared"
SHORT = "no published run has a step below 0.1 s"
OWN_MODEL = "no published run has a model of this kind"
GUESSED_LOOP = "the number of iterations of a loop depends on data"
UNKNOWN_KERNEL = "a kernel of unknown cost"
SPARSE_CORES = "no published run on this generation gathers weights with sparse cores"
SEVERAL_SLICES = "no published run on several slices was compared"
ROOFLINE = "a lower bound: the simulation was below the chip's peak rates"


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
