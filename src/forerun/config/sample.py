"""The `sample` section of a job: text that the model generates during a run and at its end."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from forerun.config.section import Section, about
from forerun.errors import JobValueError

MOST_PROMPTS = 64


class Sample(Section):
    """Sample text that is generated during a run and at its end."""

    prompt: str = about("text that the trained model continues", "any text works", "The ")
    tokens: int = about("number of tokens to generate", "enough to read", 120, ge=0)
    temperature: float = about(
        "sampling temperature; 0: greedy", "small models repeat themselves when greedy", 0.8, ge=0
    )
    every: int = about("steps between samples during the run; 0: only at its end", "samples take time", 0, ge=0)
    prompts: tuple[str, ...] = about("texts that are continued during the run", "sample.prompt alone", ())

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts during the run."""
        return self.prompts or (self.prompt,)

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("prompts"), list | str):
            prompts = value["prompts"]
            return {**value, "prompts": (prompts,) if isinstance(prompts, str) else tuple(prompts)}
        return value

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
