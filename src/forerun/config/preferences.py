"""Learning from pairs of answers, one preferred to the other: DPO and its kin."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from forerun.config.section import Section, about

USUAL_SMOOTHING = 0.1


class Preferences(Section):
    """Rows with the columns chosen and rejected, and perhaps prompt. The reference is the model that the run began
    with: how far the model moves from it is what beta holds back."""

    loss: Literal["dpo", "ipo", "cdpo"] = about(
        "dpo; ipo: a margin to reach, per token; cdpo: some labels are the wrong way round", "the one most used", "dpo"
    )
    beta: float = about(
        "how strongly the reference holds back", "its authors'; ipo: 1/(2 beta) is the margin", 0.1, gt=0
    )
    smoothing: float | None = about(
        "cdpo: the share of pairs whose label is wrong", "0.1 with cdpo, else none", None, ge=0, lt=0.5
    )
    reference: Literal["auto", "base", "cached", "beside"] = about(
        "base: the model without its adapters; cached: computed once before the first step; beside: a frozen copy",
        "auto: base with lora, else cached",
        "auto",
    )

    @model_validator(mode="after")
    def _smoothing(self) -> Preferences:
        if self.smoothing is not None and self.loss != "cdpo":
            raise ValueError(f"preferences.smoothing: {self.loss} has none; write loss: cdpo, or remove it")
        return self

    def require_reference(self, *, adapters: bool) -> None:
        """That the reference can be had in a job with or without adapters."""
        if self.reference == "base" and not adapters:
            raise ValueError(
                "preferences.reference: base needs lora, without it all weights move; write cached or beside"
            )
        if self.reference == "beside" and adapters:
            raise ValueError("preferences.reference: beside lora the base is there already; write base or cached")

    @property
    def wrong_share(self) -> float:
        """Of the labels: 0 but with cdpo."""
        if self.loss != "cdpo":
            return 0.0
        return USUAL_SMOOTHING if self.smoothing is None else self.smoothing

    def reference_with(self, *, adapters: bool) -> Literal["base", "cached", "beside"]:
        """What auto means."""
        if self.reference == "auto":
            return "base" if adapters else "cached"
        return self.reference
