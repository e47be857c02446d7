"""The dtype of the frozen weights under adapters (`lora.base`). Does not import jax.

The weights of a run with adapters end up in an export, or PEFT adds the adapters to the original files. So the frozen
weights are rounded only if the job asks for it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from forerun.config.methods.training_method import Lora
from forerun.models.model_facts import ModelFacts, Pretrained


class AdapterBase(NamedTuple):
    """A dtype for `lora.base`, and where it comes from."""

    dtype: Literal["float32", "bfloat16"]
    reason: str


def default_base(facts: ModelFacts) -> AdapterBase:
    """Return the dtype of the frozen weights of a job that leaves `lora.base` open."""
    checkpoint, name = facts.checkpoint, facts.section.name
    if checkpoint is None:
        return AdapterBase("bfloat16", "the weights are random: half the memory of float32")
    if form := dequantized_form(checkpoint):
        return AdapterBase("bfloat16", f"{name} has {form}, which are read as bfloat16")
    file = "weight files" if (dtype := checkpoint.dtype_of(files=True)) else "config.json"
    dtype = dtype or checkpoint.dtype_of(files=False)
    if dtype == "float32":
        return AdapterBase("float32", f"as in the {file} of {name}")
    if dtype == "bfloat16":
        return AdapterBase("bfloat16", f"as in the {file} of {name}")
    return AdapterBase("bfloat16", f"{name} has {dtype or 'no dtype'} in its {file}")


def derived_base(adapter: Lora | None, facts: ModelFacts) -> AdapterBase | None:
    """Return the dtype of the frozen weights, or None if the job sets it or has no adapters."""
    return default_base(facts) if adapter is not None and adapter.base is None else None


def dequantized_form(checkpoint: Pretrained) -> str | None:
    """Return the form of weights that are not stored as plain floats, or None."""
    if checkpoint.mxfp4:
        return "experts in MXFP4"
    if checkpoint.float8 is not None:
        return "FP8 weights"
    return "integers" if checkpoint.packed is not None else None
