"""Quantization-aware training: weights that learn as the integers they will be shipped as."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from forerun.config.section import Section, about
from forerun.config.targets import ALL_LINEAR, TARGETS, Targets, patterns_of

BITS = {"int4": 4, "int8": 8}


class Qat(Section):
    """Weights rounded in every forward pass; beside lora they rest, rounded, and the adapters make up for it."""

    weights: Literal["int4", "int8"] = about("what a weight is rounded to", "a quarter of bfloat16's memory", "int4")
    group: PositiveInt | None = about(
        "neighbouring inputs that share a scale; null: all inputs of an output channel",
        "32: half a bit more a weight, and much closer than a whole channel with int4",
        32,
    )
    activations: Literal["int8"] | None = about(
        "what a matrix's inputs are rounded to, with a scale per token", "none: memory is what int4 is for", None
    )
    scales: Literal["computed", "learned"] = about(
        "computed: from the largest weight at every step; learned: by their own gradient (LSQ)",
        "nothing to tune",
        "computed",
    )
    targets: Targets = about(TARGETS, "all matrices but the read-out, which is sensitive", ALL_LINEAR)

    @property
    def bits(self) -> int:
        return BITS[self.weights]

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.targets)
