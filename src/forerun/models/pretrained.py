"""The dimensions of the job's model: from a checkpoint, a named size or free dimensions. Does not import jax."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from forerun.config.schema import Job, Model
from forerun.errors import UserError
from forerun.hub import names
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.models.families.base import Config, Family
from forerun.models.families.registry import read_config
from forerun.models.families.wrapper import may_have_prefix
from forerun.models.quantization_config import (
    QUANTIZATION,
    Float8,
    Rounding,
    float8_in,
    is_mxfp4,
    recorded_rounding,
    rounding_in,
)
from forerun.models.sizes import decoder_config

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


def is_checkpoint(model: Model) -> bool:
    """Return whether the model is a hub name or a folder, not a named size or a custom class."""
    return model.name is not None and names.kind_of(model.name) in ("repository", "folder")


def pretrained(model: Model, *, weights: bool = False) -> Pretrained:
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


def config_of(model: Model, tokenizer_vocab: int | None = None) -> Config:
    """Return the dimensions of a checkpoint, a named size or free dimensions. Custom classes are not supported.

    The vocabulary of a checkpoint with new tokens is that of the run, which may be larger than that of its files.
    `tokenizer_vocab` is the number of ids of the job's tokenizer, for a section that sets no vocabulary.
    """
    if not is_checkpoint(model):
        return decoder_config(model, tokenizer_vocab)
    config = pretrained(model).config
    return config if model.vocab is None else replace(config, vocab=model.vocab)


def teacher_section(job: Job) -> Model:
    """Return the teacher of a job with distillation as a model section."""
    settings = job.method.teacher
    assert settings is not None
    return Model(name=settings.teacher, revision=settings.revision)
