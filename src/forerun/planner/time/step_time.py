"""The predicted time of one step: a range, and the parts of its middle.

The middle of the range is the simulated time. Low and high follow from the uncertainty of the step's parts, which is
scaled to published runs (docs/explanation/accuracy.md lists them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from forerun.planner.time.uncertainty import RangeTerm

# The resource that limits each part.
LIMITS = {
    "matmul": "compute",
    "attention": "compute",
    "collectives not hidden": "ICI",
    "host transfers not hidden": "host",
    "memory-bound rest": "HBM",
    "network not hidden": "network",  # between machines with GPUs
}


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step as a range, and the parts of its middle.

    `floor_seconds` is the time at the chip's peak rates. No other time of the range is below it.
    """

    mid_seconds: float
    parts_seconds: Mapping[str, float]  # by the keys of LIMITS; they add up to mid_seconds
    floor_seconds: float = 0.0
    doubts: tuple[str, ...] = ()  # reasons why the time is less certain than its range suggests
    low_factor: float = 0.75  # low / mid
    high_factor: float = 1.25
    range_reasons: tuple[RangeTerm, ...] = ()  # the largest causes of the range, except the common one
    links: str = "ICI"  # the name of the links between the devices: ICI, NVLink or PCIe

    @property
    def low_seconds(self) -> float:
        return max(self.mid_seconds * self.low_factor, self.floor_seconds)

    @property
    def high_seconds(self) -> float:
        return self.mid_seconds * self.high_factor

    @property
    def limit(self) -> str:
        """The resource that limits most of the step's time: compute, HBM, the links, network or host."""
        spent: dict[str, float] = {}
        for part, seconds in self.parts_seconds.items():
            spent[LIMITS[part]] = spent.get(LIMITS[part], 0.0) + seconds
        slowest = max(spent, key=lambda limit: spent[limit], default="compute")
        return self.links if slowest == LIMITS["collectives not hidden"] else slowest

    def times(self, factor: float) -> StepTime:
        """Return the time scaled by `factor`, but not below the floor."""
        factor = max(factor, self.floor_seconds / self.mid_seconds)
        parts = {part: seconds * factor for part, seconds in self.parts_seconds.items()}
        return replace(self, mid_seconds=self.mid_seconds * factor, parts_seconds=parts)

    def narrowed(self, share: float, least: float) -> StepTime:
        """Return the time with `share` of its range, but at least `least` to both sides, relative to the middle."""
        shorter, longer = 1 / self.low_factor - 1, self.high_factor - 1
        low, high = 1 / (1 + max(share * shorter, least)), 1 + max(share * longer, least)
        return replace(self, low_factor=low, high_factor=high)
