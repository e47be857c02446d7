"""The job's section on trackers."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from forerun.config.section import Section, about


class Track(Section):
    """Where metrics are sent besides metrics.jsonl; a tracker that is down never stops or slows a run."""

    to: tuple[str, ...] = about("tensorboard, mlflow, or module.path:Class of your own", "none: metrics.jsonl", ())
    url: str | None = about("address of the MLflow server", "the variable MLFLOW_TRACKING_URI", None)
    experiment: str = about("MLflow experiment", "one for all runs", "forerun", min_length=1)

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
            if name not in ("tensorboard", "mlflow") and not yours:
                raise ValueError(f"track.to: unknown {name!r}; known: tensorboard, mlflow, or module.path:Class")
        if len(set(to)) != len(to):
            raise ValueError("track.to: a tracker is named twice")
        return to
