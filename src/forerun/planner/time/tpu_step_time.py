"""The time of one step on a TPU slice, from the program that the compiler scheduled for it.

The middle of the range is the simulated time, with the assumptions of `chip_model.py`.
"""

from __future__ import annotations

from forerun.hardware.chips import Chip
from forerun.planner.hlo import Module
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation, Spent
from forerun.planner.time.step_time import LIMITS, StepTime

# Published / predicted seconds of the calibration half lay between 0.75 and 1.21 (bench/accuracy), rounded outward.
LOW, HIGH = 0.75, 1.25

# The simulation's kinds of time, and the part of a step that each is reported as.
WORDS = {
    "matmul": "matmul",
    "attention": "attention",
    "kernels": "attention",
    "collectives": "collectives not hidden",
    "host": "host transfers not hidden",
    "memory": "memory-bound rest",
    "dma": "memory-bound rest",
}
# The range holds only for cases that the published runs of docs/explanation/accuracy.md cover. Others get one of these
# doubts.
VALIDATED = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SHORTEST_SECONDS = 0.1
UNKNOWN_CHIP = "no published run on this generation was compared"
SHORT = "no published run has a step below 0.1 s"
OWN_MODEL = "no published run has a model of this kind"
GUESSED_LOOP = "the number of iterations of a loop depends on data"
UNKNOWN_KERNEL = "a kernel of unknown cost"
ROOFLINE = "a lower bound: the simulation was below the chip's peak rates"


def tpu_step_time(scheduled: Module, chip: Chip, model_flops: float, own_model: bool) -> StepTime:
    """Return the predicted time of a scheduled program on one chip generation.

    Args:
        scheduled: The program of one device, as the compiler scheduled it.
        chip: The chip generation to predict for.
        model_flops: FLOPs of the model per device and step. They bound the time from below, too.
        own_model: Whether the model is a user's class, which no published run covers.

    Returns:
        The time with its parts. If the simulated time is below the floor, the floor replaces it.
    """
    simulation = Simulation(scheduled, chip_model_of(chip), chip.name)
    spent = simulation.run()
    roof = PeakRates.of(chip)
    floor, model_seconds = time_floor(scheduled, roof), model_flops / roof.flops
    least = max(floor.seconds, model_seconds)
    doubts = [
        (chip.name not in VALIDATED, UNKNOWN_CHIP),
        (own_model, OWN_MODEL),
        (max(spent.seconds, least) < SHORTEST_SECONDS, SHORT),
        (bool(simulation.guessed_loops), GUESSED_LOOP),
        (spent.by_kind["kernels"] > 0, UNKNOWN_KERNEL),
        (spent.seconds < least, ROOFLINE),
    ]
    parts = _reported_parts(spent)
    if spent.seconds < least:
        # Add the difference to the part that bounds the floor, so that the parts still add up to the total.
        part = "memory-bound rest" if floor.seconds >= model_seconds and floor.memory > floor.compute else "matmul"
        parts[part] = parts.get(part, 0.0) + least - spent.seconds
    return StepTime(max(spent.seconds, least), parts, least, tuple(text for holds, text in doubts if holds), LOW, HIGH)


def _reported_parts(spent: Spent) -> dict[str, float]:
    """Return the seconds of each reported part, without parts of zero seconds."""
    parts = dict.fromkeys(LIMITS, 0.0)
    for kind, seconds in spent.by_kind.items():
        parts[WORDS[kind]] += seconds
    return {part: seconds for part, seconds in parts.items() if seconds}
