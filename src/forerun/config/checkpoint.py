"""The sections of a job about what happens between steps: `checkpoint`, `validation` and `guard`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forerun.config.section import Section, about

PositiveInt = Annotated[int, Field(gt=0, le=10**15)]  # the limit keeps sums of bytes and seconds finite
EVALUATION_STEPS = 100  # between evaluations if neither validation.every nor checkpoint.every is a number


class Checkpoint(Section):
    """When checkpoints are saved, where, and which are kept."""

    every: PositiveInt | Literal["auto"] = about(
        "steps between saves", "auto: from the time of a step and of a save; see docs/how-to/train.md", "auto"
    )
    folder: str | None = about(
        "place of the checkpoints: a folder, gs://bucket/folder or s3://bucket/folder", "in the run's folder", None
    )
    keep: PositiveInt = about("number of newest checkpoints to keep", "2: one may be damaged", 2)
    keep_every: PositiveInt | None = about("also keep checkpoints whose step is a multiple of this", "none", None)
    keep_best: int = about("also keep this many checkpoints with the lowest loss", "0: none", 0, ge=0, le=1000)

    @property
    def evaluation_steps(self) -> int:
        """The steps between evaluations if validation.every is not set."""
        return EVALUATION_STEPS if self.every == "auto" else self.every


class Validation(Section):
    """Evaluations on held-out documents during a run, and early stopping."""

    every: PositiveInt | None = about(
        "steps between evaluations on the documents that data.validation holds out",
        "checkpoint.every; 100 if that is auto",
        None,
    )
    batches: PositiveInt = about(
        "maximum batches of an evaluation, always the same rows", "an evaluation stays cheap", 32
    )
    patience: PositiveInt | None = about("stop after this many evaluations without a lower loss", "never", None)


class Guard(Section):
    """The divergence guard. A rejected step is run again once; if it is rejected again, its batch is skipped."""

    spike: float | None = about(
        "reject a gradient norm above this many times the recent median; null: reject only non-finite values",
        "30: far above what clipping handles, so it is a fault or bad data",
        30.0,
        gt=1,
    )
    window: int = about("number of recent steps in the median", "older norms say little", 64, ge=1, le=4096)
    skips: int = about("batches that may be skipped in total", "more is not an accident", 10, ge=0, le=10**6)
    in_a_row: int = about("consecutive batches that may be skipped", "more is not caused by the data", 3, ge=0, le=1000)
    compare_every: PositiveInt | None = about(
        "steps between comparisons of the state's replicas on different devices",
        "only needed to find faulty hardware",
        None,
    )
