"""The user's own finished runs correct the step-time model: measured over predicted, per chip."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError
from forerun.files import read_regular
from forerun.plan.step_time import StepTime
from forerun.units import MIB


@dataclass(frozen=True)
class Calibration:
    """By chip name, how much longer real steps took than predicted; 1 where nothing is known."""

    factors: Mapping[str, float]
    runs: Mapping[str, int]

    def applied(self, step: StepTime, chip: str) -> StepTime:
        return step.times(self.factors.get(chip, 1.0))

    def told(self) -> str:
        """`calibrated by your runs: v6e x 1.04 (3 runs)`."""
        parts = [f"{chip} x {factor:.3g} ({self.runs[chip]} runs)" for chip, factor in sorted(self.factors.items())]
        return "calibrated by your runs: " + ", ".join(parts)


def calibration(folders: Sequence[str]) -> Calibration:
    """From the `summary.json` of finished runs on TPUs: the median of measured / predicted for each chip."""
    ratios: dict[str, list[float]] = {}
    for folder in folders:
        chip, ratio = _ratio(Path(folder))
        ratios.setdefault(chip, []).append(ratio)
    factors = {chip: statistics.median(values) for chip, values in ratios.items()}
    return Calibration(factors, {chip: len(values) for chip, values in ratios.items()})


def _ratio(folder: Path) -> tuple[str, float]:
    file = folder / "summary.json"
    try:
        summary = json.loads(read_regular(file, MIB))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read", why=str(error), fix="name folders of finished runs, such as runs/quickstart"
        ) from None
    predicted, measured = summary.get("predicted_step_seconds"), summary.get("step_seconds")
    if not predicted or not measured:
        raise UserError(
            f"{folder} has no predicted step time",
            why="only runs on a TPU have one: the model knows no other device",
            fix="leave it out of --calibrate",
        )
    return str(summary["device"]["chip"]), measured / predicted
