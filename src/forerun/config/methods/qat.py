"""The `qat` section of a job: quantization-aware training."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from forerun.config.methods.targets import ALL_LINEAR, TARGETS, Targets, patterns_of
from forerun.config.section import Section, about

BITS = {"int4": 4, "int8": 8}


class Qat(Section):
    """Weights that are rounded in every forward pass. With lora, the rounded weights are frozen."""

    weights: Literal["int4", "int8"] = about(
        "integer type of the rounded weights", "a quarter of bfloat16's memory", "int4"
    )
    group: PositiveInt | None = about(
        "neighbouring inputs that share a scale; null: all inputs of an output channel",
        "32: half a bit more per weight, and with int4 much more precise than a scale per channel",
        32,
    )
    activations: Literal["int8"] | None = about(
        "integer type of a matrix's inputs, with a scale per token", "the purpose of int4 is to save memory", None
    )
    scales: Literal["computed", "learned"] = about(
        "computed: from the largest weight in every step; learned: with their own gradient (LSQ)",
        "computed: needs no tuning",
        "computed",
    )
    targets: Targets = about(TARGETS, "all matrices except the output layer, which is sensitive", ALL_LINEAR)

    @property
    def bits(self) -> int:
        return BITS[self.weights]

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.targets)
