"""The `distil` section of a job: a student learns from a teacher's distributions and from the text."""

from __future__ import annotations

from pydantic import PositiveInt, field_validator

from forerun.config.section import Section, about
from forerun.errors import JobValueError


class Distil(Section):
    """The teacher's distribution over the next token as a second target. Both models need the same tokenizer."""

    teacher: str = about("a checkpoint: hub name or folder, as model.name", "no default")
    revision: str | None = about("branch, tag or commit of a hub name", "the main branch", None)
    cache: str | None = about(
        "folder of cached teacher logits, which `forerun cache` writes", "the teacher runs in every step", None
    )
    top_k: PositiveInt = about(
        "logits per token in the cache; the others are stored as one number, their total probability",
        "see the table of gradient errors on the page about distillation",
        64,
    )
    temperature: float = about("temperature of both distributions", "the teacher's own distribution", 1.0, gt=0, le=100)
    soft: float = about(
        "share of the loss against the teacher; the rest is against the text", "0.5: equal shares", 0.5, ge=0, le=1
    )
    anchor: float = about("weight of a KL penalty for moving away from the starting model", "off", 0.0, ge=0)
    anchor_share: float = about(
        "share of the tokens on which the penalty is computed, drawn for every row", "a quarter is enough", 0.25,
        gt=0, le=1,
    )  # fmt: skip

    @field_validator("teacher")
    @classmethod
    def _checkpoint(cls, name: str) -> str:
        if not name or ":" in name:
            raise JobValueError(
                "E-JOB-030",
                f"distil.teacher: {name!r} is not a checkpoint",
                fix="write owner/name or a folder as ./teacher",
            )
        return name
