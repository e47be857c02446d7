"""The `track` section of a job: trackers that receive its metrics."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from forerun.config.section import Section, about
from forerun.errors import JobValueError

KNOWN = ("tensorboard", "mlflow", "wandb", "trackio")


class Track(Section):
    """Trackers that receive the metrics, in addition to metrics.jsonl. They never stop or slow down a run."""

    to: tuple[str, ...] = about(
        "tensorboard, mlflow, wandb, trackio, or a custom module.path:Class", "none: only metrics.jsonl", ()
    )
    url: str | None = about("address of the MLflow server", "the variable MLFLOW_TRACKING_URI", None)
    experiment: str = about("name of the MLflow experiment", "one for all runs", "forerun", min_length=1)
    project: str = about("project of wandb and trackio", "one for all runs", "forerun", min_length=1)
    entity: str | None = about("team or user of wandb", "the variable WANDB_ENTITY, or the owner of the key", None)

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("to"), list | str):
            to = value["to"]
            return {**value, "to": (to,) if isinstance(to, str) else tuple(to)}
        return value

    @field_validator("to")
    @classmethod
    def _known_or_yours(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        for name in to:
            module, colon, made = name.partition(":")
            yours = colon and all(part.isidentifier() for part in (*module.split("."), made))
            if name not in KNOWN and not yours:
                raise JobValueError(
                    "E-JOB-047",
                    f"track.to: unknown {name!r}",
                    fix=f"write one of {', '.join(KNOWN)}, or your own module.path:Class",
                )
        if len(set(to)) != len(to):
            raise JobValueError("E-JOB-048", "track.to: a tracker is named twice", fix="remove one of the two")
        return to
