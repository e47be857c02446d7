"""When checkpoints are saved, where, and which are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forerun.config.section import Section, about

PositiveInt = Annotated[int, Field(gt=0, le=10**15)]  # sums of bytes and seconds stay numbers
EVALUATION_STEPS = 100  # between evaluations if neither validation.every nor checkpoint.every is a number


class Checkpoint(Section):
    every: PositiveInt | Literal["auto"] = about(
        "steps between saves", "auto: from the time of a step and of a save; see docs/train.md", "auto"
    )
    folder: str | None = about("where else: a folder, or gs://bucket/folder", "none: in the run's folder", None)
    keep: PositiveInt = about("newest checkpoints kept", "one may be damaged", 2)
    keep_every: PositiveInt | None = about("also keep those whose step is a multiple of this", "none", None)
    keep_best: int = about("also keep so many with the lowest loss", "none", 0, ge=0, le=1000)

    @property
    def evaluation_steps(self) -> int:
        """Steps between evaluations if validation.every is not set."""
        return EVALUATION_STEPS if self.every == "auto" else self.every
