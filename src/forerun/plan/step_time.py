"""How long one step takes on a slice, from the program that the compiler scheduled for it.

The middle is what the simulation says with the assumptions of `machine.py`; low and high are how far the
published runs of the validation lay from it (docs/accuracy.md shows them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from forerun.hardware.chips import Chip
from forerun.plan.hlo import Module
from forerun.plan.machine import machine_of
from forerun.plan.roofline import Roof, floor_of
from forerun.plan.simulation import Simulation, Spent

# Published / predicted seconds of the calibration half lay between 0.75 and 1.21 (bench/accuracy), rounded outward.
LOW, HIGH = 0.75, 1.25

# What the simulation tells apart, as it is told to people.
WORDS = {
    "matmul": "matmul",
    "attention": "attention",
    "kernels": "attention",
    "collectives": "collectives not hidden",
    "queues": "collectives not hidden",
    "host": "host transfers not hidden",
    "memory": "memory-bound rest",
    "dma": "memory-bound rest",
}
LIMITS = {
    "matmul": "compute",
    "attention": "compute",
    "collectives not hidden": "ICI",
    "host transfers not hidden": "host",
    "memory-bound rest": "HBM",
}


# What the published runs of docs/accuracy.md do not cover.
VALIDATED = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SHORTEST_SECONDS = 0.1
UNKNOWN_CHIP = "no published run on this generation was compared"
SHORT = "no published run has a step below 0.1 s"
OWN_MODEL = "no published run has a model of this kind"
GUESSED_LOOP = "the number of iterations of a loop depends on data"
UNKNOWN_KERNEL = "a kernel of unknown cost"
ROOFLINE = "a lower bound: the simulation was below the chip's peak rates"


@dataclass(frozen=True)
class StepTime:
    """`floor_seconds` is the time at the chip's peak rates: no other time is below it."""

    mid_seconds: float
    parts_seconds: Mapping[str, float]  # by WORDS; they add up to mid_seconds
    floor_seconds: float = 0.0
    doubts: tuple[str, ...] = ()  # why the time is less certain than its range says

    @property
    def low_seconds(self) -> float:
        return max(self.mid_seconds * LOW, self.floor_seconds)

    @property
    def high_seconds(self) -> float:
        return self.mid_seconds * HIGH

    @property
    def limit(self) -> str:
        """What the step spends most of its time on: compute, HBM, ICI or host."""
        spent: dict[str, float] = {}
        for part, seconds in self.parts_seconds.items():
            spent[LIMITS[part]] = spent.get(LIMITS[part], 0.0) + seconds
        return max(spent, key=lambda limit: spent[limit], default="compute")

    def times(self, factor: float) -> StepTime:
        """Return the time scaled by `factor`, but not below the floor."""
        factor = max(factor, self.floor_seconds / self.mid_seconds)
        parts = {part: seconds * factor for part, seconds in self.parts_seconds.items()}
        return replace(self, mid_seconds=self.mid_seconds * factor, parts_seconds=parts)


def step_time(scheduled: Module, chip: Chip, model_flops: float = 0.0, own_model: bool = False) -> StepTime:
    """Return the time of a program as the compiler scheduled it.

    `model_flops` are those of the model's own work on one device, which bound the time as well. `own_model`: the model
    is a class of the user's.
    """
    simulation = Simulation(scheduled, machine_of(chip), chip.name)
    spent = simulation.run()
    roof = Roof.of(chip)
    floor, model_seconds = floor_of(scheduled, roof), model_flops / roof.flops
    least = max(floor.seconds, model_seconds)
    doubts = [
        (chip.name not in VALIDATED, UNKNOWN_CHIP),
        (own_model, OWN_MODEL),
        (max(spent.seconds, least) < SHORTEST_SECONDS, SHORT),
        (bool(simulation.guessed_loops), GUESSED_LOOP),
        (spent.by_kind["kernels"] > 0, UNKNOWN_KERNEL),
        (spent.seconds < least, ROOFLINE),
    ]
    parts = _in_words(spent)
    if spent.seconds < least:
        part = "memory-bound rest" if floor.seconds >= model_seconds and floor.memory > floor.compute else "matmul"
        parts[part] = parts.get(part, 0.0) + least - spent.seconds
    return StepTime(max(spent.seconds, least), parts, least, tuple(text for holds, text in doubts if holds))


def _in_words(spent: Spent) -> dict[str, float]:
    parts = dict.fromkeys(LIMITS, 0.0)
    for kind, seconds in spent.by_kind.items():
        parts[WORDS[kind]] += seconds
    return {part: seconds for part, seconds in parts.items() if seconds}
