"""The sections of a job about the run beside its steps.

They are `checkpoint`, `validation`, `guard`, `sample`, `track`, and `experts` with the losses on routers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from forerun.config.section import AS_TEXTS, Section, about, is_class_path
from forerun.errors import JobValueError

PositiveInt = Annotated[int, Field(gt=0, le=10**15)]  # the limit keeps sums of bytes and seconds finite
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
MOST_PROMPTS = 64  # of sample.prompts
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


class Sample(Section):
    """Sample text that is generated during a run and at its end."""

    prompt: str = about("text that the trained model continues", "any text works", "The ")
    tokens: int = about("number of tokens to generate", "enough to read", 120, ge=0)
    temperature: float = about(
        "sampling temperature; 0: greedy", "small models repeat themselves when greedy", 0.8, ge=0
    )
    every: int = about("steps between samples during the run; 0: only at its end", "samples take time", 0, ge=0)
    prompts: Annotated[tuple[str, ...], AS_TEXTS] = about(
        "texts that are continued during the run", "sample.prompt alone", ()
    )

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts during the run."""
        return self.prompts or (self.prompt,)

    @model_validator(mode="after")
    def _possible(self) -> Sample:
        if self.every and not self.tokens:
            raise JobValueError(
                "E-JOB-137",
                "sample.every needs tokens to generate",
                fix="set sample.tokens to more than 0, or sample.every to 0",
            )
        if len(self.prompts) > MOST_PROMPTS:
            raise JobValueError(
                "E-JOB-138",
                f"sample.prompts: {len(self.prompts)} prompts are too many",
                fix=f"write at most {MOST_PROMPTS} prompts",
            )
        if len(set(self.prompts)) != len(self.prompts):
            raise JobValueError("E-JOB-139", "sample.prompts: a prompt is given twice", fix="remove one of the two")
        return self


class Track(Section):
    """Trackers that receive the metrics, in addition to metrics.jsonl. They never stop or slow down a run."""

    to: Annotated[tuple[str, ...], AS_TEXTS] = about(
        "tensorboard, mlflow, wandb, trackio, or a custom module.path:Class", "none: only metrics.jsonl", ()
    )
    url: str | None = about("address of the MLflow server", "the variable MLFLOW_TRACKING_URI", None)
    experiment: str = about("name of the MLflow experiment", "one for all runs", "forerun", min_length=1)
    project: str = about("project of wandb and trackio", "one for all runs", "forerun", min_length=1)
    entity: str | None = about("team or user of wandb", "the variable WANDB_ENTITY, or the owner of the key", None)

    @field_validator("to")
    @classmethod
    def _known_or_yours(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        for name in to:
            if name not in TRACKERS and not is_class_path(name):
                raise JobValueError(
                    "E-JOB-047",
                    f"track.to: unknown {name!r}",
                    fix=f"write one of {', '.join(TRACKERS)}, or your own module.path:Class",
                )
        if len(set(to)) != len(to):
            raise JobValueError("E-JOB-048", "track.to: a tracker is named twice", fix="remove one of the two")
        return to


class Experts(Section):
    """Losses on the routers of a model with experts, for next-token prediction."""

    balance_loss: float | None = about(
        "coefficient of the loss that spreads tokens over the experts",
        "router_aux_loss_coef in config.json; 0 with lora, whose routers are frozen, and with other objectives",
        None,
        ge=0,
        le=1e6,
    )
    z_loss: float | None = about(
        "coefficient of the loss that keeps the routers' logits small", "0: published models do without it", None,
        ge=0, le=1e6,
    )  # fmt: skip

    @property
    def given(self) -> str | None:
        """The first key that is set to a loss, or None."""
        return next((name for name in ("balance_loss", "z_loss") if getattr(self, name)), None)
