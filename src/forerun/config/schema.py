"""The job: everything a run is, as frozen data. Knows nothing of jax, files or devices.

A field's `description` says what it is; `reason` says why its default is what it is. Both are
printed by `forerun check` and stand in the JSON Schema that editors read.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.config import limits
from forerun.config.checkpoint import Checkpoint, PositiveInt
from forerun.config.data_section import Data as Data
from forerun.config.data_section import Part as Part
from forerun.config.distil import Distil
from forerun.config.methods import Lora
from forerun.config.objective import OwnObjective, require_one_objective
from forerun.config.preferences import Preferences
from forerun.config.qat import Qat
from forerun.config.section import Section, about, shorthand
from forerun.config.track import Track

Device = Literal["tpu", "gpu", "cpu"]
DType = Literal["bfloat16", "float32"]
Sequences = Annotated[int, Field(gt=0, le=10**7)]  # of a batch: ways to divide it are counted one by one
Fraction = Annotated[float, Field(ge=0, le=1)]

FOLDER_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
RESIDUALS = ("layer_in", "query", "key", "value", "attention_out", "mlp_gate", "mlp_up")


class RopeScaling(Section):
    """Llama-3 frequency scaling for contexts beyond the one trained first."""

    factor: limits.Factor = about("how much longer the context became", "Llama 3.1 used 8", 8.0)
    low: limits.Factor = about("low frequency factor", "Llama 3.1", 1.0)
    high: limits.Factor = about("high frequency factor", "Llama 3.1", 4.0)
    original: limits.Positions = about("context length before scaling", "Llama 3.1", 8192)


class Model(Section):
    """A Hugging Face checkpoint, a named size, a size with changes, free dimensions, or a `module.path:Class`."""

    name: str | None = about(
        "hub name or folder; with random weights: named size, module.path:Class", "free dimensions without a name", None
    )
    revision: str | None = about("branch, tag or commit of a hub name", "its main branch", None)
    layers: limits.Layers | None = about("number of blocks", "from the named size", None)
    embed: limits.Width | None = about("width of the residual stream", "from the named size", None)
    heads: limits.Heads | None = about("query heads", "from the named size", None)
    kv_heads: limits.Heads | None = about("key/value heads", "named size, else = heads", None)
    head_dim: limits.HeadWidth | None = about("width of a head", "named size, else embed / heads", None)
    mlp: limits.MlpWidth | None = about("width inside the MLP", "named size, else 8/3 embed", None)
    vocab: limits.Vocabulary | None = about("vocabulary", "named size, else the tokenizer's", None)
    tied: bool | None = about("input and output embedding are one", "named size, else yes", None)
    qkv_bias: bool | None = about("bias on q, k, v (Qwen2)", "named size, else no", None)
    qk_norm: bool | None = about("RMSNorm on q and k (Qwen3)", "named size, else no", None)
    window: limits.Positions | None = about("sliding attention window", "named size, else none", None)
    rope_theta: limits.Theta | None = about("RoPE base", "named size, else 10000", None)
    rope_scaling: RopeScaling | None = about("Llama-3 RoPE scaling", "from the named size", None)
    norm_eps: limits.Epsilon | None = about("RMSNorm epsilon", "named size, else 1e-6", None)
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of your own model class",
        json_schema_extra={"reason": "only for module.path:Class"},
    )

    @field_validator("name")
    @classmethod
    def _class_of_a_module(cls, name: str | None) -> str | None:
        module, colon, made = (name or "").partition(":")
        if colon and not all(part.isidentifier() for part in (*module.split("."), made)):
            raise ValueError(f"model.name: {name!r} is not module.path:Class; write for example my_model:Net")
        return name


class Optimizer(Section):
    lr: float = about("peak learning rate", "a usual AdamW start for small models", 3e-4, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = about(
        "shape after warm-up", "cosine is the common choice", "cosine"
    )
    warmup: float = about("share of the steps, or a number of steps if >= 1", "3 % is enough with AdamW", 0.03, ge=0)
    final_lr: Fraction = about("last rate as a share of lr", "a tenth keeps learning to the end", 0.1)
    weight_decay: float = about("on matrices only, never on norms and biases", "AdamW for language models", 0.1, ge=0)
    b1: Fraction = about("first moment", "AdamW", 0.9)
    b2: Fraction = about("second moment", "0.95 is steadier than 0.999 for language models", 0.95)
    eps: float = about("AdamW epsilon", "Optax", 1e-8, gt=0)
    clip: float | None = about("global gradient norm limit; null: none", "1.0 stops rare spikes", 1.0, gt=0)
    ema: Fraction | None = about("decay of an averaged copy of the weights", "off: costs one more copy", None)


_AXIS_SIZE = {"anyOf": [{"const": -1}, {"minimum": 1}]}


class Mesh(Section):
    """How devices are laid out. One axis may be -1: whatever is left."""

    data: int = about(
        "copies of the model, each with its part of the batch",
        "fsdp does the same with less memory",
        1,
        editors=_AXIS_SIZE,
    )
    fsdp: int = about("batch and weights split together", "-1: every device that is left", -1, editors=_AXIS_SIZE)
    tp: int = about(
        "every layer split across devices", "only for large models: it talks all the time", 1, editors=_AXIS_SIZE
    )

    @field_validator("data", "fsdp", "tp")
    @classmethod
    def _devices(cls, size: int, info: ValidationInfo) -> int:
        if size < 1 and size != -1:
            raise ValueError(
                f"mesh.{info.field_name}: {size} is not a number of devices; write 1 or more, or -1 for what is left"
            )
        return size


class Remat(Section):
    """What the backward pass finds in memory; the rest is computed again."""

    policy: Literal["none", "full", "dots", "named"] = about(
        "none: keep all, dots: keep matmuls, full: keep layer inputs, named: keep the lists below",
        "full: smallest that needs no host",
        "full",
    )
    keep: tuple[str, ...] = about("residuals kept in device memory", "policy named only", ())
    offload: tuple[str, ...] = about("residuals kept in host memory", "policy named only", ())

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tuple(v) if k in ("keep", "offload") and isinstance(v, list) else v for k, v in value.items()}
        return value

    @model_validator(mode="after")
    def _names(self) -> Remat:
        names = (*self.keep, *self.offload)
        unknown = sorted(set(names) - set(RESIDUALS))
        if unknown:
            raise ValueError(f"unknown residual {unknown[0]!r}; known: {', '.join(RESIDUALS)}")
        if names and self.policy != "named":
            raise ValueError("keep and offload need policy: named")
        if len(set(names)) != len(names):
            raise ValueError("a residual is named twice")
        return self


class Precision(Section):
    params: DType = about("master weights and optimizer state", "float32: small updates are not lost", "float32")
    compute: DType = about("matrix multiplications", "what the TPU's matrix unit multiplies", "bfloat16")


class Guard(Section):
    """Steps whose figures are wrong are never taken: run again once, then left out with their batch."""

    spike: float | None = about(
        "a gradient norm this many times the recent median is wrong; null: only what is not finite is",
        "30: far beyond what clipping is for, so it is a fault or broken data",
        30.0,
        gt=1,
    )
    window: int = about("steps that the median is of", "old norms say little", 64, ge=1, le=4096)
    skips: int = about("batches that may be left out, in all", "more is not an accident", 10, ge=0, le=10**6)
    in_a_row: int = about("batches that may be left out one after the other", "more is not the data", 3, ge=0, le=1000)
    compare_every: PositiveInt | None = about(
        "steps between comparisons of the copies of the state that devices hold",
        "none: a search for bad hardware",
        None,
    )


class Validation(Section):
    every: PositiveInt | None = about(
        "steps between looks at the documents that data.validation keeps back",
        "checkpoint.every; 100 if that is auto",
        None,
    )
    batches: PositiveInt = about("rows looked at, at most so many batches, always the same", "a small price", 32)
    patience: PositiveInt | None = about("stop after so many looks without a lower loss", "never", None)


class Sample(Section):
    prompt: str = about("text that the trained model continues", "any start will do", "The ")
    tokens: int = about("tokens to write", "enough to read", 120, ge=0)
    temperature: float = about("0 is greedy", "small models repeat themselves when greedy", 0.8, ge=0)


class Job(Section):
    """One run, whole."""

    name: str = about(
        "folder under runs/",
        "the job file's name; of job.yaml, its folder's",
        "job",
        editors={"pattern": f"^{FOLDER_NAME}$"},
    )
    seed: int = about("weights and data order", "any number", 0, ge=0, lt=2**32)
    device: Literal["auto", "tpu", "gpu", "cpu"] | Annotated[tuple[Device, ...], Field(min_length=1)] = about(
        "auto, one of tpu/gpu/cpu, or a list to fall back along", "auto: TPU, then GPU, then CPU", "auto"
    )
    devices: PositiveInt | None = about("use only this many", "all that are there", None)
    model: Annotated[Model, shorthand("name")]
    data: Annotated[Data, shorthand("path")]
    sequence: PositiveInt = about("tokens in a sequence", "common for small models", 1024)
    batch: Sequences = about("sequences per optimizer step, over all devices", "the same on every device", 32)
    micro_batch: Sequences | None = about(
        "sequences per device at a time", "the whole batch at once: no accumulation", None
    )
    steps: PositiveInt | None = about("optimizer steps", "one epoch if epochs is not given either", None)
    epochs: float | None = about("passes over the data, instead of steps", "steps decide", None, gt=0, le=1e6)
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    remat: Annotated[Remat, shorthand("policy")] = Remat()
    precision: Precision = Precision()
    lora: Lora | None = about("adapters: see below", "none: all weights learn", None)
    preferences: Annotated[Preferences | None, shorthand("loss")] = about(
        "learn from pairs of answers: see below", "none: learn the next token", None
    )
    objective: Annotated[OwnObjective | None, shorthand("name")] = about(
        "an objective of your own, module.path:Class: see below", "none: learn the next token", None
    )
    qat: Qat | None = about("weights that learn as integers: see below", "none: weights stay floats", None)
    distil: Annotated[Distil | None, shorthand("teacher")] = about("a teacher: see below", "none: the text alone", None)
    attention: Literal["auto", "splash", "cudnn", "xla"] = about(
        "attention kernel", "auto: splash on TPU, cuDNN on GPU, XLA elsewhere", "auto"
    )
    loss_chunk: PositiveInt | None = about(
        "positions of the sequence whose logits exist at one time", "keeps a device's logits under 512 MiB", None
    )
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    log_every: PositiveInt = about("steps between lines of metrics", "every step is cheap", 1)
    track: Annotated[Track, shorthand("to")] = Track()
    sample: Sample = Sample()
    runs: str = about("where run folders go", "in the folder you stand in", "runs")

    @model_validator(mode="before")
    @classmethod
    def _device_list(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("device"), list):
            return {**value, "device": tuple(value["device"])}
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Job:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both given: keep one")
        return self

    @model_validator(mode="after")
    def _one_objective(self) -> Job:
        require_one_objective(self)
        return self

    @model_validator(mode="after")
    def _validation(self) -> Job:
        if self.validation.patience is not None and not self.data.validation:
            raise ValueError("validation.patience: no document is kept back; set data.validation, e.g. 0.05")
        every, save = self.validation.every, self.checkpoint.every
        judged = self.data.validation and self.checkpoint.keep_best
        if judged and every is not None and save != "auto" and save % every:
            raise ValueError(
                f"checkpoint.keep_best needs a look at every save: checkpoint.every={save} must be a "
                f"multiple of validation.every ({every})"
            )
        return self

    @model_validator(mode="after")
    def _scales(self) -> Job:
        if self.qat and self.lora and self.qat.scales == "learned":
            raise ValueError("qat.scales: learned beside lora: only adapters learn then; remove it")
        if self.qat and self.lora and self.lora.is_quantized:
            raise ValueError(
                f"lora.base: {self.lora.base} beside qat, which rounds the base already; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _folder_name(self) -> Job:
        if not re.fullmatch(FOLDER_NAME, self.name):
            raise ValueError(
                f"name: {self.name!r} is not a safe folder name; use letters, digits, '.', '_' and '-', no '.' first "
                "(without this key it is the name of the file)"
            )
        return self
