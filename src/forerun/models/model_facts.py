"""Facts about the model of a job, a teacher or a SOURCE argument. Importing this module does not import jax."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config import schema
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hub import names
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.models import sizes
from forerun.models.decoder_config import DecoderConfig, ExpertConfig, Gpt2Config
from forerun.models.families.base import Config, Family
from forerun.models.families.registry import family_for, read_config
from forerun.models.families.wrapper import may_have_prefix
from forerun.models.plugin import Plugin, create_plugin
from forerun.models.quantization_config import (
    QUANTIZATION,
    Float8,
    Rounding,
    float8_in,
    is_mxfp4,
    recorded_rounding,
    rounding_in,
)
from forerun.models.sizes import decoder_config, is_plugin

if TYPE_CHECKING:
    from forerun.models.base import Model
    from forerun.models.decoder import Decoder
    from forerun.models.gpt2 import Gpt2

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors and in config.json
BESIDE_A_CHECKPOINT = ("name", "revision", "options", "new_tokens", "new_special_tokens", "first_new_token")


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint with its parsed config.json. Its weights may not be downloaded yet."""

    snapshot: Snapshot
    family: Family
    config: Config
    packed: Rounding | None = None  # the format of its packed integers; None: its weights are floats
    recorded: Rounding | None = None  # how its floats were rounded, as a dense export recorded it
    float8: Float8 | None = None  # the scales of its FP8 weights, which are dequantized when they are read
    mxfp4: bool = False  # whether its experts are in MXFP4; they are dequantized when they are read

    def dtype_of(self, *, files: bool) -> str | None:
        """Return the dtype of most bytes of the weights: float32, float16, bfloat16 or another name in safetensors.

        Args:
            files: Whether to read it from the headers of the weight files instead of config.json.

        Returns:
            None if the files are not on this machine yet, or if config.json has no dtype.
        """
        if not files:
            content = self.snapshot.config()
            text = content.get("text_config")
            sections = [content, *([text] if isinstance(text, dict) else [])]
            dtypes = [section.get(key) for key in ("dtype", "torch_dtype") for section in sections]
            return next((dtype for dtype in dtypes if isinstance(dtype, str)), None)
        try:
            weights = self.snapshot.open_weights()
        except UserError:
            return None
        with weights:
            bytes_of: Counter[str] = Counter()
            for tensor in weights.values():
                bytes_of[tensor.dtype] += tensor.data_bytes
        return FLOATS.get(dtype := bytes_of.most_common(1)[0][0], dtype) if bytes_of else None

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the weights, whether they are stored as integers or floats; None for unrounded weights."""
        return self.packed or self.recorded


def is_checkpoint(model: schema.Model) -> bool:
    """Return whether the model is a hub name or a folder, not a named size or a custom class."""
    return model.name is not None and names.kind_of(model.name) in ("repository", "folder")


def pretrained(model: schema.Model, *, weights: bool = False) -> Pretrained:
    """Return the checkpoint that the model section names, downloaded if needed.

    Args:
        model: A model section with the name of a checkpoint.
        weights: Whether to download the weights too.

    Raises:
        UserError: The section also sets dimensions, or the checkpoint is not available or not supported.
    """
    # New tokens change the vocabulary, which `resolve` fills in together with the id of the first one.
    allowed = (*BESIDE_A_CHECKPOINT, *(["vocab"] if model.first_new_token is not None else []))
    given = [key for key in type(model).model_fields if key not in allowed and getattr(model, key) is not None]
    if given:
        raise UserError(
            "E-MODEL-011",
            f"model.{given[0]} cannot be changed in {model.name}",
            why="its weights have the dimensions in its config.json",
            fix=f"remove model.{given[0]}; or set all dimensions without a name, and train from scratch",
        )
    return _pretrained(model.name or "", model.revision, weights)


@cache
def _pretrained(name: str, revision: str | None, weights: bool) -> Pretrained:
    return read_snapshot(snapshot(name, revision, weights=weights), f"{name}/config.json")


def read_snapshot(found: Snapshot, where: str) -> Pretrained:
    """Return the checkpoint in a folder.

    Args:
        found: The folder.
        where: The name of its config.json, for errors.

    Raises:
        UserError: The family or a feature is not supported, or a value is missing or invalid.
    """
    content = dict(found.config())
    section = content.get(QUANTIZATION)
    packed, float8, mxfp4 = rounding_in(section), float8_in(section), is_mxfp4(section)
    if packed is not None or float8 is not None or mxfp4:
        content.pop(QUANTIZATION)
    names = found.tensor_names() if may_have_prefix(content) else None
    family, config = read_config(content, where, names)
    recorded = None if packed or float8 or mxfp4 else recorded_rounding(found.folder)
    return Pretrained(found, family, config, packed, recorded, float8, mxfp4)


def config_of(model: schema.Model, tokenizer_vocab: int | None = None) -> Config:
    """Return the dimensions of a checkpoint, a named size or free dimensions. Custom classes are not supported.

    The vocabulary of a checkpoint with new tokens is that of the run, which may be larger than that of its files.
    `tokenizer_vocab` is the number of ids of the job's tokenizer, for a section that sets no vocabulary.
    """
    if not is_checkpoint(model):
        return decoder_config(model, tokenizer_vocab)
    config = pretrained(model).config
    return config if model.vocab is None else replace(config, vocab=model.vocab)


def teacher_section(job: Job) -> schema.Model:
    """Return the teacher of a job with distillation as a model section."""
    settings = job.method.teacher
    assert settings is not None
    return schema.Model(name=settings.teacher, revision=settings.revision)


# ---- Models ----


MEMBERS = ("vocab", "heads", "specs", "apply", "flops_per_token")


def model_of(section: schema.Model) -> Model:
    """Return the model of a section. The section must give the vocabulary, unless its name implies it.

    A custom class is created with the vocabulary and the job's options.
    """
    if not is_plugin(section):
        return model_for(config_of(section))
    name = section.name or ""
    foreign = [key for key in type(section).model_fields if key not in ("name", "vocab", "options")]
    if given := [key for key in foreign if getattr(section, key) is not None]:
        raise UserError(
            "E-MODEL-012",
            f"model.{given[0]} is a key of the decoder family, not of {name}",
            why="a custom model takes its dimensions from model.options",
            fix=f"set model.options.{given[0]} if the class has this argument, or remove model.{given[0]}",
        )
    kind = Plugin("model", "model.options", "vocab is added by forerun", MEMBERS, "forerun.models.base.Model")
    return create_plugin(name, {"vocab": section.vocab, **section.options}, kind)


def model_for(config: Config) -> Decoder | Gpt2:
    """Return the built-in model with these dimensions."""
    if isinstance(config, Gpt2Config):
        from forerun.models.gpt2 import Gpt2

        return Gpt2(config)
    from forerun.models.decoder import Decoder

    return Decoder(config)


# ---- Facts ----


@dataclass(frozen=True)
class ModelOutline:
    """The files of a checkpoint that does not exist yet: its config.json and its tokenizer, but no weights.

    Attributes:
      folder: the folder with the files.
      label: what the checkpoint is, for errors, such as "result of stage sft".
    """

    folder: Path
    label: str


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint, dimensions, tensor names and model object of a model section, each computed on first use.

    Attributes:
      section: the model section.
      outline: what is known about the checkpoint that the section names, if it does not exist yet.
    """

    section: schema.Model
    outline: ModelOutline | None = None

    @property
    def is_plugin(self) -> bool:
        """Whether the section names a custom class (`module.path:Class`)."""
        return sizes.is_plugin(self.section)

    @property
    def is_checkpoint(self) -> bool:
        """Whether the section names a checkpoint: a repository of the hub or a folder."""
        return self.outline is not None or is_checkpoint(self.section)

    @cached_property
    def checkpoint(self) -> Pretrained | None:
        """The checkpoint with its config.json, or None for random weights. Its weights may not be downloaded yet."""
        if self.outline is not None:
            files = Snapshot(str(self.section.name), self.outline.folder, None)
            return read_snapshot(files, f"config.json of the {self.outline.label}")
        return pretrained(self.section) if self.is_checkpoint else None

    @cached_property
    def downloaded_checkpoint(self) -> Pretrained:
        """The checkpoint with its weights, which are downloaded if necessary."""
        return pretrained(self.section, weights=True)

    @property
    def snapshot(self) -> Snapshot | None:
        """The files of the checkpoint, or None for random weights."""
        return None if self.checkpoint is None else self.checkpoint.snapshot

    @cached_property
    def config(self) -> Config | None:
        """The dimensions, or None for a custom class, which does not expose them."""
        return self.config_for(None)

    def config_for(self, tokenizer_vocab: int | None) -> Config | None:
        """Return the dimensions. A section without a vocabulary gets that of a tokenizer with this number of ids."""
        if self.is_plugin:
            return None
        if self.checkpoint is None:
            return config_of(self.section, tokenizer_vocab)
        vocab, config = self.section.vocab, self.checkpoint.config  # new tokens may have changed the vocabulary
        return config if vocab is None else replace(config, vocab=vocab)

    @cached_property
    def dimensions(self) -> Config | None:
        """The dimensions of a model whose vocabulary may still be unknown. Do not use the vocabulary of the result."""
        return self.config_for(self.section.vocab or 1)

    @cached_property
    def family(self) -> Family | None:
        """The family whose tables name the tensors, or None for a model without a Hugging Face form."""
        if self.checkpoint is not None:
            return self.checkpoint.family
        try:
            return None if self.config is None else family_for(self.config)
        except UserError:
            return None

    @cached_property
    def module_names(self) -> dict[str, str]:
        """The module name in transformers for each path of a weight, with {} for the layer.

        For example, `blocks.query` is `q_proj`. Weights that are fused in transformers share a name. The dictionary is
        empty for a model without a Hugging Face form.
        """
        tensors = self.family.modules if self.family else ()
        return {part.leaf: tensor.name.removesuffix(".weight") for tensor in tensors for part in tensor.parts}

    @property
    def heads(self) -> int | None:
        """The number of query heads. None for a custom class, whose model object has to be created to know it."""
        return None if self.config is None else self.config.heads

    @property
    def experts(self) -> ExpertConfig | None:
        """The experts of the layers, or None for a model without experts and for a custom class."""
        return self.dimensions.experts if isinstance(self.dimensions, DecoderConfig) else None

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        vocab = self.section.vocab if self.config is None else self.config.vocab
        assert vocab is not None, "`resolve_model` fills in the vocabulary"
        return vocab

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files of the checkpoint include a tokenizer."""
        return self.snapshot is not None and self.snapshot.file("tokenizer.json") is not None

    @cached_property
    def model(self) -> Model:
        """The model object, which holds dimensions and no arrays. Imports jax."""

        return model_of(self.section) if self.config is None else model_for(self.config)
