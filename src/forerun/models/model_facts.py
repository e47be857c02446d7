"""Facts about the model of a job, a teacher or a SOURCE argument. Importing this module does not import jax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config import schema
from forerun.errors import UserError
from forerun.hub.snapshot import Snapshot
from forerun.models import sizes
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.families.base import Config, Family
from forerun.models.families.registry import family_for
from forerun.models.pretrained import Pretrained, config_of, is_checkpoint, pretrained, read_snapshot

if TYPE_CHECKING:
    from forerun.models.base import Model


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
        from forerun.models.registry import model_for, model_of

        return model_of(self.section) if self.config is None else model_for(self.config)
