"""Correction of predicted step times by the user's own finished runs: measured / predicted, per chip."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError
from forerun.files import read_regular
from forerun.planner.time.step_time import StepTime
from forerun.units import MIB


@dataclass(frozen=True)
class Calibration:
    """Factors by chip name: measured step time / predicted step time. A chip without runs has the factor 1."""

    factors: Mapping[str, float]
    runs: Mapping[str, int]  # number of runs behind each factor

    def applied(self, step: StepTime, chip: str) -> StepTime:
        """Return `step` scaled by the factor of `chip`."""
        return step.times(self.factors.get(chip, 1.0))

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
    return Calibration(factors, {chip: len(values) for chip, values in ratios.items()})


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
