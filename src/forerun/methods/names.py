"""What the weights of a model are called elsewhere: `blocks.query` is q_proj to everybody who knows PEFT."""

from __future__ import annotations

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.models.families.base import Family
from forerun.models.families.registry import family_for
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import is_plugin


def family_named(section: Model) -> Family | None:
    """The family whose tables name the tensors; None for a model that has no Hugging Face form."""
    if is_plugin(section):
        return None
    if is_checkpoint(section):
        return pretrained(section).family
    try:
        return family_for(config_of(section))
    except UserError:
        return None


def module_names(section: Model) -> dict[str, str]:
    """Path of a weight -> name of its module in transformers, with {} for the layer. Fused ones share a name."""
    family = family_named(section)
    tensors = family.table if family else ()
    return {part.leaf: one.name.removesuffix(".weight") for one in tensors for part in one.parts}
