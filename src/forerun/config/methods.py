"""How a model learns, beyond the next token with all of its weights: each method is a section that a job may have."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from forerun.config.section import Section, about
from forerun.config.targets import ALL_LINEAR, TARGETS, Targets, patterns_of


class Lora(Section):
    """Adapters beside the weights of a model at rest; only they learn, and only they are saved."""

    rank: PositiveInt = about("columns of an adapter", "8 is enough for a style or a format; 16 to 64 for more", 8)
    alpha: float = about("an adapter counts alpha / rank", "twice the usual rank, as its authors", 16.0, gt=0)
    targets: Targets = about(
        TARGETS,
        "all matrices but the read-out: no worse than fewer of a larger rank",
        ALL_LINEAR,
    )
    dropout: float = about("share of an adapter's inputs left out in training", "off: data is the better cure", 0.0,
                           ge=0, lt=1)  # fmt: skip
    rslora: bool = about("an adapter counts alpha / sqrt(rank)", "off: PEFT's default", False)
    dora: bool = about("each output's length learns by itself (DoRA)", "off: slower, for a small gain", False)
    base: Literal["float32", "bfloat16", "int8", "int4", "nf4"] = about(
        "how the matrices at rest are kept; with int8, int4 and nf4 (QLoRA) all but these rests in bfloat16",
        "half the memory of float32; they are never updated",
        "bfloat16",
    )
    block: int = about("inputs that share a scale, with int8, int4 and nf4", "QLoRA's", 64, gt=0, multiple_of=2)
    start: str | None = about("a PEFT folder whose adapters are the first ones", "none: adapters that change nothing",
                              None)  # fmt: skip

    @property
    def is_quantized(self) -> bool:
        return self.base not in ("float32", "bfloat16")

    @property
    def resting(self) -> str:
        """The dtype of what rests and is not quantized."""
        return "bfloat16" if self.is_quantized else self.base

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.targets)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
