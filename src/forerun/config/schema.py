"""The schema of a job: an immutable description of a run. It does not depend on jax, files or devices.

The `description` of a field says what the key is. The `reason` says why its default is what it is. `forerun check`
prints both, and they are in the JSON Schema for editors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.config import limits
from forerun.config.data_section import Data as Data
from forerun.config.data_section import Part as Part
from forerun.config.optimizer import Optimizer as Optimizer
from forerun.config.run_sections import Checkpoint, Experts, PositiveInt, Track
from forerun.config.run_sections import Guard as Guard
from forerun.config.run_sections import Sample as Sample
from forerun.config.run_sections import Validation as Validation
from forerun.config.section import AS_TUPLE, Section, Texts, about, is_class_path, shorthand
from forerun.config.training_method import (
    CustomObjective,
    Distil,
    Lora,
    Preferences,
    Qat,
    TrainingMethod,
    require_new_tokens,
    require_one_objective,
)
from forerun.errors import JobValueError

Device = Literal["tpu", "gpu", "cpu"]
EightBits = Literal["int8", "fp8"]
DType = Literal["bfloat16", "float32"]
Sequences = Annotated[int, Field(gt=0, le=10**7)]  # limited, because the divisors of a batch are enumerated

OptionValue = Annotated[bool | int | float | str | None, Field(union_mode="left_to_right")]

_OPTION_NAME = re.compile(r"xla_[a-z0-9_]{2,120}")
# Compiler options that a job must not set, each with the reason. A pattern is searched in the name.
_REFUSED_OPTIONS = (
    (r"dump", "it writes files"),
    (r"_(file|files|path|dir|directory|folder)(_|$)|_data_dir|load_ptx|extra_flags", "it names files or programs"),
    (r"excess_precision|fast_m|approximate|stochastic|bf16|bfloat16|_fp8|_f8|reduced_precision", "it changes results"),
    (r"inject|ignore_errors|disable_hlo_passes|enable_hlo_passes|_for_testing|_test_only", "it is for compiler tests"),
)

FOLDER_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
RESIDUALS = ("layer_in", "query", "key", "value", "attention_out", "mlp_gate", "mlp_up")


class RopeScaling(Section):
    """RoPE frequency scaling of Llama 3, for contexts longer than the original one."""

    factor: limits.Factor = about("ratio of the new to the original context length", "Llama 3.1", 8.0)
    low: limits.Factor = about("low frequency factor", "Llama 3.1", 1.0)
    high: limits.Factor = about("high frequency factor", "Llama 3.1", 4.0)
    original: limits.Positions = about("context length before scaling", "Llama 3.1", 8192)


class Model(Section):
    """A Hugging Face checkpoint, a named size, a size with changes, free dimensions, or a `module.path:Class`."""

    name: str | None = about(
        "hub name or folder; with random weights: named size, module.path:Class", "free dimensions", None
    )
    revision: str | None = about("branch, tag or commit of a hub name", "the main branch", None)
    layers: limits.Layers | None = about("number of blocks", "from the named size", None)
    embed: limits.Width | None = about("width of the residual stream", "from the named size", None)
    heads: limits.Heads | None = about("query heads", "from the named size", None)
    kv_heads: limits.Heads | None = about("key/value heads", "named size, else = heads", None)
    head_dim: limits.HeadWidth | None = about("width of a head", "named size, else embed / heads", None)
    mlp: limits.MlpWidth | None = about("width inside the MLP", "named size, else 8/3 embed", None)
    vocab: limits.Vocabulary | None = about(
        "size of the vocabulary", "the tokenizer's; of a named size without data.tokenizer, its own", None
    )
    tied: bool | None = about("input and output embedding share one matrix", "named size, else yes", None)
    qkv_bias: bool | None = about("bias on q, k, v (Qwen2)", "named size, else no", None)
    qk_norm: bool | None = about("RMSNorm on q and k (Qwen3)", "named size, else no", None)
    window: limits.Positions | None = about("length of the sliding attention window", "named size, else none", None)
    rope_theta: limits.Theta | None = about("RoPE base", "named size, else 10000", None)
    rope_scaling: RopeScaling | None = about("Llama-3 RoPE scaling", "from the named size", None)
    norm_eps: limits.Epsilon | None = about("RMSNorm epsilon", "named size, else 1e-6", None)
    new_tokens: Texts | None = about(
        "tokens added to a checkpoint's tokenizer, recognised in any text; their rows of the embedding are trained",
        "none",
        None,
    )
    new_special_tokens: Texts | None = about(
        "as new_tokens, but special: a text in the data cannot forge them, a chat template can write them", "none", None
    )
    first_new_token: int | None = about(
        "id of the first new token; forerun fills it in and records it with the run",
        "the next free id of the tokenizer",
        None,
        ge=0,
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of a custom model class",
        json_schema_extra={"reason": "only for module.path:Class"},
    )

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of all new tokens, in the order of their ids."""
        return (*(self.new_tokens or ()), *(self.new_special_tokens or ()))

    @field_validator("name")
    @classmethod
    def _class_of_a_module(cls, name: str | None) -> str | None:
        if name is not None and ":" in name and not is_class_path(name):
            raise JobValueError(
                "E-JOB-036", f"model.name: {name!r} is not module.path:Class", fix="write for example my_model:Net"
            )
        return name


_AXIS_SIZE = {"anyOf": [{"const": -1}, {"minimum": 1}]}


class Mesh(Section):
    """The layout of the devices. One axis may be -1, which means all remaining devices."""

    data: int = about(
        "copies of the model, each with its part of the batch",
        "fsdp does the same with less memory",
        1,
        editors=_AXIS_SIZE,
    )
    fsdp: int = about(
        "parts into which the batch and the weights are split", "-1: all remaining devices", -1, editors=_AXIS_SIZE
    )
    tp: int = about(
        "parts into which each layer is split",
        "1: only large models need it, because it communicates in every layer",
        1,
        editors=_AXIS_SIZE,
    )
    context: int = about(
        "parts into which each sequence is split, for sequences that one device cannot hold",
        "1: longer sequences need more memory, not another program",
        1,
        ge=1,
    )
    expert: int = about("parts of the experts of each layer and of the batch", "1: fsdp gathers the experts", 1, ge=1)
    slices: PositiveInt | None = about(
        "TPU slices, each with a copy of the model and with the axes above", "all slices of the devices", None
    )
    dcn_dtype: Literal["float32", "bfloat16"] = about(
        "dtype of gradients that are summed over slices", "float32: bfloat16 halves the traffic and rounds", "float32"
    )
    min_slices: PositiveInt | None = about(
        "slices with which the run may continue, at the same batch, while others are lost", "all slices", None
    )
    slice_wait_seconds: float = about(
        "time for which a lost slice is waited for; only with min_slices",
        "60: about two restarts",
        60.0,
        ge=0,
        le=86400,
    )

    @field_validator("data", "fsdp", "tp")
    @classmethod
    def _devices(cls, size: int, info: ValidationInfo) -> int:
        if size < 1 and size != -1:
            raise JobValueError(
                "E-JOB-037",
                f"mesh.{info.field_name}: {size} is not a number of devices",
                fix="write 1 or more, or -1 for the remaining devices",
            )
        return size

    @model_validator(mode="after")
    def _fewer_slices(self) -> Mesh:
        if self.min_slices is not None and self.min_slices > (self.slices or 0):
            fix = f"write 1 to {self.slices}" if self.slices else "set mesh.slices, too"
            raise JobValueError("E-JOB-160", f"mesh.min_slices: {self.min_slices} is more than mesh.slices", fix=fix)
        return self


class Remat(Section):
    """Activations that are kept in memory for the backward pass. The others are computed again."""

    policy: Literal["none", "full", "dots", "named"] = about(
        "none: keep all, dots: keep matmuls, full: keep layer inputs, named: keep the lists below",
        "full: the least memory without offloading",
        "full",
    )
    keep: Texts = about("residuals kept in device memory", "policy named only", ())
    offload: Texts = about("residuals kept in host memory", "policy named only", ())

    @model_validator(mode="after")
    def _names(self) -> Remat:
        names = (*self.keep, *self.offload)
        unknown = sorted(set(names) - set(RESIDUALS))
        if unknown:
            raise JobValueError("E-JOB-038", f"unknown residual {unknown[0]!r}", fix=f"known: {', '.join(RESIDUALS)}")
        if names and self.policy != "named":
            raise JobValueError("E-JOB-039", "keep and offload need policy: named", fix="set remat.policy=named")
        if len(set(names)) != len(names):
            raise JobValueError("E-JOB-040", "a residual is named twice", fix="name each once, in keep or in offload")
        return self


class Precision(Section):
    """The dtypes of weights and computation."""

    params: DType = about(
        "dtype of master weights and optimizer state", "float32: small updates are not lost", "float32"
    )
    compute: DType = about("dtype of matrix multiplications", "the native type of the TPU's matrix unit", "bfloat16")
    matmul: EightBits | None = about("int8 or fp8: operands in the layers", "compute: 8 bits change the loss", None)


class Job(Section):
    """The complete description of one run."""

    name: str = about(
        "name of the run and of its folder in runs/",
        "the name of the job file, or of its folder if it is job.yaml",
        "job",
        editors={"pattern": f"^{FOLDER_NAME}$"},
    )
    seed: int = about("seed of random weights and data order", "any number", 0, ge=0, lt=2**32)
    device: Annotated[
        Literal["auto", "tpu", "gpu", "cpu"] | Annotated[tuple[Device, ...], Field(min_length=1)], AS_TUPLE
    ] = about("auto, one of tpu/gpu/cpu, or a list in order of preference", "auto: TPU, then GPU, then CPU", "auto")
    devices: PositiveInt | None = about("number of devices to use", "all available devices", None)
    model: Annotated[Model, shorthand("name")]
    data: Annotated[Data, shorthand("path")]
    sequence: PositiveInt = about("tokens in a sequence", "common for small models", 1024)
    batch: Sequences = about("sequences per optimizer step, over all devices", "independent of the devices", 32)
    micro_batch: Sequences | None = about(
        "sequences per device at a time", "the complete batch in one pass: no accumulation", None
    )
    steps: PositiveInt | None = about("number of optimizer steps", "one epoch, unless epochs is set", None)
    epochs: float | None = about("passes over the data, instead of steps", "steps is used", None, gt=0, le=1e6)
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    remat: Annotated[Remat, shorthand("policy")] = Remat()
    precision: Precision = Precision()
    lora: Lora | None = about("train adapters: see below", "all weights are trained", None)
    preferences: Annotated[Preferences | None, shorthand("loss")] = about(
        "learn from pairs of answers: see below", "next-token prediction", None
    )
    objective: Annotated[CustomObjective | None, shorthand("name")] = about(
        "a custom objective, module.path:Class: see below", "next-token prediction", None
    )
    qat: Qat | None = about("train with rounded weights: see below", "weights are not rounded", None)
    experts: Experts = Experts()
    distil: Annotated[Distil | None, shorthand("teacher")] = about(
        "learn from a teacher: see below", "no teacher", None
    )
    attention: Literal["auto", "splash", "cudnn", "xla"] = about(
        "attention kernel", "auto: splash on TPU, cuDNN on GPU, XLA elsewhere", "auto"
    )
    unroll: bool | Literal["auto"] = about(
        "run the layers one after the other, without a loop over them; auto: if that fits and is faster",
        "no: a loop compiles in seconds, however many layers there are",
        False,
    )
    compiler_options: dict[str, OptionValue] = Field(
        default_factory=dict,
        description="options of the XLA compiler that replace or extend forerun's own; null removes one",
        json_schema_extra={"reason": "forerun chooses the fastest for the devices and the mesh"},
    )
    loss_chunk: PositiveInt | None = about(
        "positions whose logits are in memory at one time", "logits under 512 MiB; on TPUs 1/16 of the memory", None
    )
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    log_every: PositiveInt = about("steps between rows in metrics.jsonl", "1: a row is cheap", 1)
    track: Annotated[Track, shorthand("to")] = Track()
    sample: Sample = Sample()
    runs: str = about("folder of the run folders", "in the current folder", "runs")

    if TYPE_CHECKING:
        # pydantic accepts shorthands such as `model="qwen3-0.6b"` and dictionaries, which the types of the fields hide.
        def __init__(self, *, model: Model | str | dict[str, Any], data: Data | str | dict[str, Any], **more: Any): ...

    @property
    def method(self) -> TrainingMethod:
        """The training method that the job's sections select."""
        return TrainingMethod(self.lora, self.qat, self.distil, self.preferences)

    def _repr_html_(self) -> str:
        """Return the job as a table for notebooks: the values that differ from their defaults, then all others."""
        from forerun.pages.render import render
        from forerun.safe_text import redacted_tree

        changed = dict(_leaves("", self.model_dump(exclude_defaults=True)))
        values = _leaves("", redacted_tree(self.model_dump()))
        rows = [(key, "-" if value is None else str(value), key not in changed) for key, value in values]
        return render("job.html.jinja", name=self.name, rows=rows)

    def with_teacher_revision(self, revision: str | None) -> Job:
        """Return the job with another revision of its teacher. A job without a teacher is returned unchanged."""
        if self.distil is None:
            return self
        return self.model_copy(update={"distil": self.distil.model_copy(update={"revision": revision})})

    def with_lora_base(self, dtype: Literal["float32", "bfloat16"]) -> Job:
        """Return the job with another dtype of the frozen weights. A job without adapters is returned unchanged."""
        if self.lora is None:
            return self
        return self.model_copy(update={"lora": self.lora.model_copy(update={"base": dtype})})

    def with_initial_adapter(self, folder: str | None) -> Job:
        """Return the job with another folder of initial adapters. A job without adapters is returned unchanged."""
        if self.lora is None:
            return self
        return self.model_copy(update={"lora": self.lora.model_copy(update={"start": folder})})

    @model_validator(mode="after")
    def _one_length(self) -> Job:
        if self.steps is not None and self.epochs is not None:
            raise JobValueError("E-JOB-041", "steps and epochs are both given", fix="keep one of them")
        return self

    @field_validator("compiler_options")
    @classmethod
    def _compiler_flags(cls, options: dict[str, OptionValue]) -> dict[str, OptionValue]:
        """Raise unless all names are compiler flags that change only how fast a program runs."""
        for name in options:
            if not _OPTION_NAME.fullmatch(name):
                raise JobValueError(
                    "E-JOB-153",
                    f"compiler_options: {name!r} is not the name of a compiler option",
                    fix="write it as xla_..., without dashes",
                )
            for pattern, reason in _REFUSED_OPTIONS:
                if re.search(pattern, name):
                    raise JobValueError(
                        "E-JOB-154",
                        f"compiler_options.{name}: {reason}",
                        fix="remove it, or set it in the environment for one command",
                    )
        return options

    @model_validator(mode="after")
    def _one_objective(self) -> Job:
        require_one_objective(self)
        return self

    @model_validator(mode="after")
    def _validation(self) -> Job:
        if self.validation.patience is not None and not self.data.validation:
            raise JobValueError(
                "E-JOB-042",
                "validation.patience: no documents are held out",
                fix="set data.validation, for example to 0.05",
            )
        every, save = self.validation.every, self.checkpoint.every
        judged = self.data.validation and self.checkpoint.keep_best
        if judged and every is not None and save != "auto" and save % every:
            raise JobValueError(
                "E-JOB-043",
                f"checkpoint.keep_best needs an evaluation at every save: checkpoint.every={save} must be a "
                f"multiple of validation.every ({every})",
                fix=f"set checkpoint.every to a multiple of {every}, or checkpoint.keep_best to false",
            )
        return self

    @model_validator(mode="after")
    def _new_tokens(self) -> Job:
        require_new_tokens(self.model.added_tokens, self.method)
        return self

    @model_validator(mode="after")
    def _scales(self) -> Job:
        if self.qat and self.lora and self.qat.scales == "learned":
            raise JobValueError(
                "E-JOB-044",
                "qat.scales: learned is not possible with lora, which trains only adapters",
                fix="remove qat.scales",
            )
        if self.qat and self.lora and self.lora.is_quantized:
            raise JobValueError(
                "E-JOB-045",
                f"lora.base: {self.lora.base} is not possible with qat, which rounds the base already",
                fix="remove lora.base or qat",
            )
        return self

    @model_validator(mode="after")
    def _folder_name(self) -> Job:
        if not re.fullmatch(FOLDER_NAME, self.name):
            raise JobValueError(
                "E-JOB-046",
                f"name: {self.name!r} is not a safe folder name",
                fix="use letters, digits, '.', '_' and '-', no '.' first (without this key it is the name of the file)",
            )
        return self


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of nested dictionaries."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, value
