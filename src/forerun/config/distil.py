"""Distillation: a student learns from the distributions of a teacher, not only from the text."""

from __future__ import annotations

from pydantic import PositiveInt, field_validator

from forerun.config.section import Section, about


class Distil(Section):
    """A teacher's distribution over the next token as a second target; its tokenizer must be the student's."""

    teacher: str = about("a checkpoint: hub name or folder, as model.name", "the job must say it")
    revision: str | None = about("branch, tag or commit of a hub name", "its main branch", None)
    cache: str | None = about(
        "folder of the teacher's logits, which `forerun cache` makes once", "none: the teacher runs in every step", None
    )
    top_k: PositiveInt = about(
        "logits kept for each token in the cache; the rest is one number, their mass",
        "see the table of gradient errors on the page about distillation",
        64,
    )
    temperature: float = about("both distributions are softened by it", "the teacher as it is", 1.0, gt=0, le=100)
    soft: float = about(
        "share of the loss against the teacher; the rest is against the text", "half and half", 0.5, ge=0, le=1
    )
    anchor: float = about("weight of a KL pull towards the model that the run began with", "none", 0.0, ge=0)
    anchor_share: float = about(
        "share of the tokens that the pull is measured on, drawn for every row", "a quarter is enough", 0.25,
        gt=0, le=1,
    )  # fmt: skip

    @field_validator("teacher")
    @classmethod
    def _checkpoint(cls, name: str) -> str:
        if not name or ":" in name:
            raise ValueError(f"distil.teacher: {name!r} is not a checkpoint; write owner/name or a folder as ./teacher")
        return name
