"""The `lora` section, and the training method that the sections of a job select together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from forerun.config.methods.distil import Distil
from forerun.config.methods.preferences import Preferences
from forerun.config.methods.qat import Qat
from forerun.config.methods.targets import ALL_LINEAR, TARGETS, Targets, patterns_of
from forerun.config.section import Section, about
from forerun.errors import JobValueError


class Lora(Section):
    """Low-rank adapters for the frozen weights of a model. Only the adapters are trained and saved."""

    rank: PositiveInt = about("rank of an adapter", "8 is enough for a style or a format; 16 to 64 for more", 8)
    alpha: float = about("adapters are scaled by alpha / rank", "twice the default rank, a common choice", 16.0, gt=0)
    targets: Targets = about(
        TARGETS,
        "all matrices except the output layer: no worse than fewer adapters with a larger rank",
        ALL_LINEAR,
    )
    dropout: float = about("share of an adapter's inputs dropped in training", "off: more data is a better remedy", 0.0,
                           ge=0, lt=1)  # fmt: skip
    rslora: bool = about("scale adapters by alpha / sqrt(rank)", "off: PEFT's default", False)
    dora: bool = about("train the magnitude of each output separately (DoRA)", "off: slower, for a small gain", False)
    base: Literal["float32", "bfloat16", "int8", "int4", "nf4"] | None = about(
        "type of the frozen matrices; with int8, int4 and nf4 (QLoRA), other frozen weights are in bfloat16",
        "that of the checkpoint's files; bfloat16 for integers, FP8, float16 and random weights",
        None,
    )
    block: int = about("inputs that share a scale, with int8, int4 and nf4", "as in QLoRA", 64, gt=0, multiple_of=2)
    start: str | None = about("a PEFT folder with initial adapters", "new adapters that change nothing at first",
                              None)  # fmt: skip

    @property
    def is_quantized(self) -> bool:
        return self.base in ("int8", "int4", "nf4")

    @property
    def resting(self) -> str:
        """The dtype of the frozen weights that are not quantized. `resolve` fills in an open base."""
        return "float32" if self.base == "float32" else "bfloat16"

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.targets)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class TrainingMethod:
    """The training method that the four method sections of a job select.

    Only `config` and `methods` read the sections. Other packages use these properties, so that a new method changes the
    properties and not every place that depends on a method.
    """

    lora: Lora | None
    qat: Qat | None
    distil: Distil | None
    preferences: Preferences | None

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained and the model's own weights stay fixed."""
        return self.lora is not None

    @property
    def adapter(self) -> Lora | None:
        """The shape of the adapters, or None if the model's own weights are trained."""
        return self.lora

    @property
    def initial_adapter(self) -> str | None:
        """The PEFT folder with the initial adapters, or None for new adapters."""
        return self.lora.start if self.lora is not None else None

    @property
    def exports_adapter(self) -> bool:
        """Whether an export contains only the adapters. Adapters of a rounded base are exported together with it."""
        return self.lora is not None and self.qat is None

    @property
    def may_hold_other_weights(self) -> bool:
        """Whether a run may have other weights than the model's: adapters, learned scales, a teacher or a reference."""
        has_scales = self.qat is not None and self.qat.scales == "learned"
        has_reference = self.preferences is not None and self.preferences.reference == "beside"
        return self.lora is not None or self.distil is not None or has_scales or has_reference

    @property
    def integer_weights(self) -> Literal["int4", "int8"] | None:
        """The integer type that weights are rounded to in every forward pass, or None."""
        return self.qat.weights if self.qat is not None else None

    @property
    def trains_rounded_weights(self) -> bool:
        """Whether the trained weights are rounded. With adapters, the rounded weights are frozen."""
        return self.qat is not None and self.lora is None

    @property
    def recomputes_scales(self) -> bool:
        """Whether every step computes the scales of rounded, trained weights from these weights."""
        return self.trains_rounded_weights and self.qat is not None and self.qat.scales == "computed"

    @property
    def data_is_pairs(self) -> bool:
        """Whether each row of the data is a pair of a preferred and a rejected answer."""
        return self.preferences is not None

    @property
    def teacher(self) -> Distil | None:
        """The settings of the teacher, or None without distillation."""
        return self.distil

    @property
    def runs_teacher(self) -> bool:
        """Whether every step runs the teacher. False if there is none, or if its logits are cached."""
        return self.distil is not None and self.distil.cache is None


def require_new_tokens(texts: tuple[str, ...], method: TrainingMethod) -> None:
    """Raise if the new tokens of a model are not different texts, or if the method has a second model."""
    wrong = next((text for n, text in enumerate(texts) if not text.strip() or text in texts[:n]), None)
    if wrong is not None:
        raise JobValueError("E-JOB-075", f"model.new_tokens: {wrong!r} is empty or given twice", fix="remove it")
    if texts and (method.preferences is not None or method.distil is not None):
        name = "distil" if method.preferences is None else "preferences"
        raise JobValueError(
            "E-JOB-076",
            f"model.new_tokens is not possible with {name}, whose second model does not know these tokens",
            fix="train the tokens first, export the run with --merge, and start from that folder",
        )
