"""The `preferences` section of a job: learning from pairs of answers with DPO and related losses."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from forerun.config.section import Section, about
from forerun.errors import JobValueError

USUAL_SMOOTHING = 0.1


class Preferences(Section):
    """Pairs of answers: rows with the columns chosen and rejected, and optionally prompt.

    The reference is the model that the run starts with. `beta` limits how far the model moves away from it.
    """

    loss: Literal["dpo", "ipo", "cdpo"] = about(
        "dpo; ipo: reach a margin per token; cdpo: some labels are swapped", "the most common loss", "dpo"
    )
    beta: float = about(
        "how strongly the model is kept near the reference",
        "as in the DPO paper; with ipo, the margin is 1/(2 beta)",
        0.1,
        gt=0,
    )
    smoothing: float | None = about(
        "share of pairs whose labels are swapped, for cdpo", "0.1 with cdpo, else none", None, ge=0, lt=0.5
    )
    reference: Literal["auto", "base", "cached", "beside"] = about(
        "base: the model without its adapters; cached: log-probabilities, computed once before the first step; "
        "beside: a frozen copy in memory",
        "auto: base with lora, else cached",
        "auto",
    )

    @model_validator(mode="after")
    def _smoothing(self) -> Preferences:
        if self.smoothing is not None and self.loss != "cdpo":
            raise JobValueError(
                "E-JOB-033",
                f"preferences.smoothing: {self.loss} does not use it",
                fix="write loss: cdpo, or remove preferences.smoothing",
            )
        return self

    def require_reference(self, *, adapters: bool) -> None:
        """Raise if the reference is not possible in a job with or without adapters."""
        if self.reference == "base" and not adapters:
            raise JobValueError(
                "E-JOB-034",
                "preferences.reference: base needs lora: without it, all weights change",
                fix="write cached or beside",
            )
        if self.reference == "beside" and adapters:
            raise JobValueError(
                "E-JOB-035",
                "preferences.reference: with lora, the base is the reference already",
                fix="write base or cached",
            )

    @property
    def wrong_share(self) -> float:
        """The share of pairs whose labels are swapped. It is 0 for all losses except cdpo."""
        if self.loss != "cdpo":
            return 0.0
        return USUAL_SMOOTHING if self.smoothing is None else self.smoothing

    def reference_with(self, *, adapters: bool) -> Literal["base", "cached", "beside"]:
        """Return the reference, with `auto` resolved for a job with or without adapters."""
        if self.reference == "auto":
            return "base" if adapters else "cached"
        return self.reference
