"""The dimensions of the job's model, whatever names it: a checkpoint, a named size or free dimensions. Free of jax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.hub import names
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.models.families.base import Config, Family
from forerun.models.families.registry import read_config
from forerun.models.rounding import QUANTIZATION, Rounding, recorded_rounding, rounding_in
from forerun.models.sizes import decoder_config

BESIDE_A_CHECKPOINT = ("name", "revision", "options")


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint whose config.json has been understood; its weights may not be here yet."""

    snapshot: Snapshot
    family: Family
    config: Config
    packed: Rounding | None = None  # how its integers are to be read; None: its weights are floats
    recorded: Rounding | None = None  # how its floats were rounded, by the record of a dense export

    @property
    def rounding(self) -> Rounding | None:
        return self.packed or self.recorded


def is_checkpoint(model: Model) -> bool:
    """A name on the hub or a folder, as opposed to a named size and a class of the user's own."""
    return model.name is not None and names.kind_of(model.name) in ("repository", "folder")


def pretrained(model: Model, *, weights: bool = False) -> Pretrained:
    """With `weights`, they are fetched as well."""
    given = [key for key in type(model).model_fields if key not in BESIDE_A_CHECKPOINT and getattr(model, key, None)]
    if given:
        raise UserError(
            f"model.{given[0]} cannot be changed in {model.name}",
            why="its weights have the dimensions that its config.json says",
            fix=f"remove model.{given[0]}, or give all dimensions without a name and train from scratch",
        )
    return _pretrained(model.name or "", model.revision, weights)


@cache
def _pretrained(name: str, revision: str | None, weights: bool) -> Pretrained:
    found = snapshot(name, revision, weights=weights)
    content = dict(found.config())
    packed = rounding_in(content.get(QUANTIZATION))
    if packed is not None:
        content.pop(QUANTIZATION)
    family, config = read_config(content, f"{name}/config.json")
    return Pretrained(found, family, config, packed, None if packed else recorded_rounding(found.folder))


def config_of(model: Model, tokenizer_vocab: int | None = None) -> Config:
    """Not for a class of the user's own, which has its dimensions to itself."""
    return pretrained(model).config if is_checkpoint(model) else decoder_config(model, tokenizer_vocab)
