"""How long one step takes on a slice, from the program that the compiler scheduled for it.

The middle is what the simulation says with the assumptions of `machine.py`; low and high are how far the
published runs of the validation lay from it (docs/accuracy.md shows them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.hardware.chips import Chip
from forerun.plan.hlo import Module
from forerun.plan.machine import machine_of
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


@dataclass(frozen=True)
class StepTime:
    mid_seconds: float
    parts_seconds: Mapping[str, float]  # by WORDS; they add up to mid_seconds

    @property
    def low_seconds(self) -> float:
        return self.mid_seconds * LOW

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


def step_time(scheduled: Module, chip: Chip) -> StepTime:
    """Of one program, as the compiler scheduled it."""
    spent = Simulation(scheduled, machine_of(chip), chip.name).run()
    return StepTime(spent.seconds, _in_words(spent))


def _in_words(spent: Spent) -> dict[str, float]:
    parts = dict.fromkeys(LIMITS, 0.0)
    for kind, seconds in spent.by_kind.items():
        parts[WORDS[kind]] += seconds
    return {part: seconds for part, seconds in parts.items() if seconds}
