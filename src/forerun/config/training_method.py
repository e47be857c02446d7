"""The sections of a job that select a training method, and the method that they select together.

They are `lora` (adapters), `qat` (rounding), `distil` (a teacher), `preferences` (pairs of answers) and `objective`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from forerun.config.section import AS_TUPLE, Section, about, is_class_path
from forerun.errors import JobValueError

ALL_LINEAR = "all-linear"
TARGETS = "'all-linear', or names of weights, which may have wildcards: query, q_proj, blocks.*"


Targets = Annotated[str | tuple[str, ...], AS_TUPLE]
BITS = {"int4": 4, "int8": 8}
USUAL_SMOOTHING = 0.1


def patterns_of(targets: Targets) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else targets


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
        if not is_class_path(name):
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
