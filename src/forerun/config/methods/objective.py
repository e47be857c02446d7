"""The `objective` section of a job: a custom objective."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from forerun.config.section import Section, about
from forerun.errors import JobValueError


class CustomObjective(Section):
    """A class `module.path:Class`, installed or next to the job file. docs/how-to/own.md describes its interface."""

    name: str = about("module.path:Class", "no default")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the class",
        json_schema_extra={"reason": "the defaults of the class"},
    )

    @field_validator("name")
    @classmethod
    def _class_of_a_module(cls, name: str) -> str:
        module, colon, made = name.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), made)):
            raise JobValueError(
                "E-JOB-031", f"objective.name: {name!r} is not module.path:Class", fix="write for example my_loss:ZLoss"
            )
        return name


def require_one_objective(job: Any) -> None:
    """Raise if a job has more than one section that defines what is learned, or a reference that is not possible."""
    given = [name for name in ("objective", "preferences", "distil") if getattr(job, name, None) is not None]
    if len(given) > 1:
        raise JobValueError(
            "E-JOB-032",
            f"{given[0]} and {given[1]} are both given: each defines what is learned",
            fix="keep one of them",
        )
    if job.preferences is not None:
        job.preferences.require_reference(adapters=job.lora is not None)
