"""An objective of the user's own, named by its class."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from forerun.config.section import Section, about


class OwnObjective(Section):
    """A class `module.path:Class` beside the job file or installed; docs/own.md says what it must have."""

    name: str = about("module.path:Class", "the job must say it")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the class",
        json_schema_extra={"reason": "the class's own defaults"},
    )

    @field_validator("name")
    @classmethod
    def _class_of_a_module(cls, name: str) -> str:
        module, colon, made = name.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), made)):
            raise ValueError(f"objective.name: {name!r} is not module.path:Class; write for example my_loss:ZLoss")
        return name


def require_one_objective(job: Any) -> None:
    """Of the sections that say what is learned a job has one at most, and that one can be had."""
    given = [name for name in ("objective", "preferences", "distil") if getattr(job, name, None) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} are both given: each says what is learned, keep one")
    if job.preferences is not None:
        job.preferences.require_reference(adapters=job.lora is not None)
