"""Names of a model's weights in transformers and PEFT, for example `q_proj` for `blocks.query`."""

from __future__ import annotations

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.models.families.base import Family
from forerun.models.families.registry import family_for
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import is_plugin


def family_named(section: Model) -> Family | None:
    """Return the family whose table names the tensors, or None for a model without a Hugging Face form."""
    if is_plugin(section):
        return None
    if is_checkpoint(section):
        return pretrained(section).family
    try:
        return family_for(config_of(section))
    except UserError:
        return None


def module_names(section: Model) -> dict[str, str]:
    """Return the module name in transformers for each path of a weight, with {} for the layer.

    Weights that are fused in transformers share a name. The result is empty for a model without a Hugging Face form.
    """
    family = family_named(section)
    tensors = family.table if family else ()
    return {part.leaf: one.name.removesuffix(".weight") for one in tensors for part in one.parts}
