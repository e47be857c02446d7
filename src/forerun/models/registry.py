"""Creation of a model from the job's model section: a built-in model or a custom class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.config import schema
from forerun.errors import UserError
from forerun.models.base import Model
from forerun.models.decoder_config import Gpt2Config
from forerun.models.families.base import Config
from forerun.models.plugin import Plugin, create_plugin
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin

MEMBERS = ("vocab", "heads", "specs", "apply", "flops_per_token")

if TYPE_CHECKING:
    from forerun.models.decoder import Decoder
    from forerun.models.gpt2 import Gpt2


def model_of(section: schema.Model) -> Model:
    """Return the model of a section. The section must give the vocabulary, unless its name implies it."""
    if is_plugin(section):
        return _plugin(section)
    return model_for(config_of(section))


def model_for(config: Config) -> Decoder | Gpt2:
    """Return the built-in model with these dimensions."""
    if isinstance(config, Gpt2Config):
        from forerun.models.gpt2 import Gpt2

        return Gpt2(config)
    from forerun.models.decoder import Decoder

    return Decoder(config)


def _plugin(section: schema.Model) -> Model:
    """Return an instance of a custom class, created with the vocabulary and the job's options."""
    name = section.name or ""
    foreign = [key for key in type(section).model_fields if key not in ("name", "vocab", "options")]
    given = [key for key in foreign if getattr(section, key) is not None]
    if given:
        raise UserError(
            "E-MODEL-012",
            f"model.{given[0]} is a key of the decoder family, not of {name}",
            why="a custom model takes its dimensions from model.options",
            fix=f"set model.options.{given[0]} if the class has this argument, or remove model.{given[0]}",
        )
    return create_plugin(
        name,
        {"vocab": section.vocab, **section.options},
        Plugin(
            "model", "model.options", "vocab is added by forerun", needs=MEMBERS, protocol="forerun.models.base.Model"
        ),
    )
