"""The predicted time of one step: a range, and the parts of its middle.

The middle of the range is the simulated time. Low and high follow from the uncertainty of the step's parts. Each part
has a relative uncertainty with a physical reason (`RELATIVE`). The parts are assumed to be independent, so their
effects on the step add up in quadrature. One common term is always included: another version of the compiler, and
overheads of the training loop. One factor, `SCALE`, multiplies all effects. It is the only figure that is fitted to
published runs (bench/accuracy/ranges.py), so that about 85 to 90 % of them are inside their ranges.
docs/explanation/accuracy.md lists them all. The user's own finished runs can correct the times of a chip.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.errors import UserError
from forerun.files import read_regular
from forerun.units import MIB

# The resource that limits each part.
LIMITS = {
    "matmul": "compute",
    "attention": "compute",
    "collectives not hidden": "ICI",
    "host transfers not hidden": "host",
    "memory-bound rest": "HBM",
    "network not hidden": "network",  # between machines with GPUs
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
SCALE = 1.85  # bench/accuracy/ranges.py
MATTERS = 0.25  # terms with at least this share of the largest effect are reasons for the range
MOST_REASONS = 3
SHARED = 0.5  # share of the error's variance that all runs on a chip have in common (assumed, 2026-11)


@dataclass(frozen=True)
class RelativeError:
    """How much shorter or longer than predicted a part can be, as shares of its predicted time."""

    shorter: float
    longer: float


@dataclass(frozen=True)
class RangeTerm:
    """A cause of uncertainty, and how much shorter or longer the step can be because of it."""

    cause: str
    share: float  # of the step's time that the cause affects
    shorter: float  # as a share of the predicted step
    longer: float

    @property
    def effect(self) -> float:
        return max(self.shorter, self.longer)


@dataclass(frozen=True)
class TimeRange:
    """The range of a step relative to its predicted time, and the causes that contribute most, largest first."""

    low_factor: float
    high_factor: float
    reasons: tuple[RangeTerm, ...] = ()


# Another version of the compiler changes a program by about 5 %. What the simulation omits (input, logging, hosts that
# wait for each other) only adds time: the same program was published with 2.38 and 2.70 s, a difference of 13 %.
COMMON = RangeTerm("compiler version and training loop", 1.0, 0.05, 0.13)
# The uncertainty of each kind of time. "Assumed" figures have no better source (2026-11).
RELATIVE: dict[str, RelativeError] = {
    # Fusions reach 62 to 98 % of the matrix unit's peak in dumped code. The mean of a program varies by 5 %.
    "matmul": RelativeError(0.05, 0.05),
    # Cycles of the compiler's final code: what varies is the number of skipped blocks and the overlap of loads.
    "attention kernels": RelativeError(0.05, 0.05),
    # Scaled from the nearest shape that was counted. Counted shapes differ from such a scaling by up to this much.
    "attention kernels of another shape": RelativeError(0.15, 0.15),
    # HBM traffic alone is a lower bound of a kernel's time. Assumed: a kernel can take twice as long.
    "kernels of unknown cost": RelativeError(0.10, 1.00),
    # Copies reach 83 to 90 % of the data sheet's bandwidth. Vector arithmetic is not modelled and adds time.
    "memory-bound operations": RelativeError(0.12, 0.18),
    # The overhead of a fusion is assumed, so it may be missing or twice as long.
    "overheads of short operations": RelativeError(1.00, 1.00),
    # The rate of the network card is the data sheet's, and no published run on several slices was compared. Assumed.
    "transfers between slices": RelativeError(0.20, 1.00),
    # The trip count is the largest constant of the condition. The data may end the loop earlier.
    "loops of unknown length": RelativeError(0.50, 0.50),
    # Another version of the compiler may have enough memory without this work.
    "recomputation for lack of HBM": RelativeError(0.80, 0.20),
}


def term(cause: str, share: float) -> RangeTerm:
    """Return the term of a part that takes `share` of the step."""
    relative = RELATIVE[cause]
    return RangeTerm(cause, share, share * relative.shorter, share * relative.longer)


def part_terms(shares: Mapping[str, float]) -> list[RangeTerm]:
    """Return a term for each part of a step. The keys of `shares` are causes of RELATIVE."""
    return [term(cause, share) for cause, share in shares.items() if share > 0]


def time_range(terms: Iterable[RangeTerm], scale: float = SCALE) -> TimeRange:
    """Combine independent terms and the common one into a range.

    The error of a time is a ratio: a step that can take 1.25 times as long can as well take 1 / 1.25 of the time.
    """
    found = [COMMON, *terms]
    shorter, longer = (
        scale * math.hypot(*sides) for sides in zip(*((x.shorter, x.longer) for x in found), strict=True)
    )
    ordered = sorted(found[1:], key=lambda x: -x.effect)
    least = MATTERS * max((x.effect for x in found), default=0.0)
    reasons = tuple(x for x in ordered[:MOST_REASONS] if x.effect >= least)
    return TimeRange(1 / (1 + shorter), 1 + longer, reasons)


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


# ---- Correction by the user's own finished runs: measured / predicted, per chip ----


@dataclass(frozen=True)
class Calibration:
    """Factors by chip name: measured step time / predicted step time. A chip without runs has the factor 1."""

    factors: Mapping[str, float]
    runs: Mapping[str, int]  # number of runs behind each factor
    spreads: Mapping[str, float] = field(default_factory=dict)  # largest deviation of a run from its chip's factor

    def applied(self, step: StepTime, chip: str) -> StepTime:
        """Return `step` scaled by the factor of `chip`. Its range is narrower, but has the spread of the runs."""
        if chip not in self.factors:
            return step
        share = remaining_share(self.runs[chip])
        return step.times(self.factors[chip]).narrowed(share, self.spreads.get(chip, 0.0))

    def told(self) -> str:
        """Return a line for the report, such as `calibrated by your runs: v6e x 1.04 (3 runs)`."""
        parts = [f"{chip} x {factor:.3g} ({self.runs[chip]} runs)" for chip, factor in sorted(self.factors.items())]
        return "calibrated by your runs: " + ", ".join(parts)


def calibration(folders: Sequence[str]) -> Calibration:
    """Return the median of measured / predicted for each chip.

    Args:
        folders: Run folders of finished runs on TPUs. Their `summary.json` has both times.

    Raises:
        UserError: A summary cannot be read, or has no predicted step time.
    """
    ratios: dict[str, list[float]] = {}
    for folder in folders:
        chip, ratio = _ratio(Path(folder))
        ratios.setdefault(chip, []).append(ratio)
    factors = {chip: statistics.median(values) for chip, values in ratios.items()}
    spreads = {
        chip: max(max(ratio / factors[chip], factors[chip] / ratio) - 1 for ratio in values)
        for chip, values in ratios.items()
    }
    return Calibration(factors, {chip: len(values) for chip, values in ratios.items()}, spreads)


def remaining_share(runs: int) -> float:
    """Return the share of a range that remains after a calibration by a number of runs on the same chip.

    The error of a prediction has a part that all runs on a chip share, and one of the single program. The runs reveal
    the shared part, with an uncertainty that decreases with their number. The other part remains.
    """
    alone = 1 - SHARED
    return math.sqrt(alone + 1 / (1 / SHARED + runs / alone))


def _ratio(folder: Path) -> tuple[str, float]:
    """Return (chip name, measured / predicted step time) of one run."""
    file = folder / "summary.json"
    try:
        summary = json.loads(read_regular(file, MIB))
    except (OSError, ValueError) as error:
        raise UserError(
            "E-PLAN-001",
            f"{file} cannot be read",
            why=str(error),
            fix="name folders of finished runs, such as runs/quickstart",
        ) from None
    predicted, measured = summary.get("predicted_step_seconds"), summary.get("step_seconds")
    if not predicted or not measured:
        raise UserError(
            "E-PLAN-002",
            f"{folder} has no predicted step time",
            why="step times are predicted for TPUs only",
            fix="remove it from --calibrate",
        )
    return str(summary["device"]["chip"]), measured / predicted
