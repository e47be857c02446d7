"""Correction of predicted step times by the user's own finished runs: measured / predicted, per chip."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun.errors import UserError
from forerun.files import read_regular
from forerun.planner.time.step_time import StepTime
from forerun.units import MIB

SHARED = 0.5  # share of the error's variance that all runs on a chip have in common (assumed, 2026-11)


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
