"""Facts about the model of a job, a teacher or a SOURCE argument. Importing this module does not import jax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from forerun.config import schema
from forerun.hub.snapshot import Snapshot
from forerun.methods.names import family_named
from forerun.models import sizes
from forerun.models.families.base import Config, Family
from forerun.models.pretrained import Pretrained, config_of, is_checkpoint, pretrained

if TYPE_CHECKING:
    from forerun.models.base import Model


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint, dimensions, tensor names and model object of a model section, each computed on first use."""

    section: schema.Model

    @property
    def is_plugin(self) -> bool:
        """Whether the section names a custom class (`module.path:Class`)."""
        return sizes.is_plugin(self.section)

    @cached_property
    def checkpoint(self) -> Pretrained | None:
        """The checkpoint with its config.json, or None for random weights. Its weights may not be downloaded yet."""
        return pretrained(self.section) if is_checkpoint(self.section) else None

    @property
    def snapshot(self) -> Snapshot | None:
        """The files of the checkpoint, or None for random weights."""
        return None if self.checkpoint is None else self.checkpoint.snapshot

    @cached_property
    def config(self) -> Config | None:
        """The dimensions, or None for a custom class, which does not expose them."""
        return None if self.is_plugin else config_of(self.section)

    @cached_property
    def family(self) -> Family | None:
        """The family whose tables name the tensors, or None for a model without a Hugging Face form."""
        return family_named(self.section)

    @property
    def heads(self) -> int | None:
        """The number of query heads. None for a custom class, whose model object has to be created to know it."""
        return None if self.config is None else self.config.heads

    @property
    def experts(self) -> int | None:
        """The number of experts of a layer, or None for a model without experts and for a custom class."""
        experts = getattr(self.config, "experts", None)
        return None if experts is None else experts.count

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        found = self.section.vocab if self.config is None else self.config.vocab
        assert found is not None, "`resolve` fills in the vocabulary"
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files of the checkpoint include a tokenizer."""
        return self.snapshot is not None and self.snapshot.file("tokenizer.json") is not None

    @cached_property
    def model(self) -> Model:
        """The model object, which holds dimensions and no arrays. Imports jax."""
        from forerun.models.registry import model_of

        return model_of(self.section)
