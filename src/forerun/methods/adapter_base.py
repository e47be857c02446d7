"""The dtype of the frozen weights under adapters (`lora.base`). Does not import jax.

The weights of a run with adapters end up in an export, or PEFT adds the adapters to the original files. So the frozen
weights are rounded only if the job asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from forerun.config.schema import Job
from forerun.models.pretrained import Pretrained, is_checkpoint, pretrained


class AdapterBase(NamedTuple):
    """A dtype for `lora.base`, and where it comes from."""

    dtype: Literal["float32", "bfloat16"]
    reason: str


def default_base(job: Job) -> AdapterBase:
    """Return the dtype of the frozen weights of a job that leaves `lora.base` open."""
    if not is_checkpoint(job.model):
        return AdapterBase("bfloat16", "the weights are random: half the memory of float32")
    checkpoint = pretrained(job.model)
    if form := _dequantized(checkpoint):
        return AdapterBase("bfloat16", f"{job.model.name} has {form}, which are read as bfloat16")
    place = "weight files" if (dtype := checkpoint.dtype_of(files=True)) else "config.json"
    dtype = dtype or checkpoint.dtype_of(files=False)
    if dtype == "float32":
        return AdapterBase("float32", f"as in the {place} of {job.model.name}")
    if dtype == "bfloat16":
        return AdapterBase("bfloat16", f"as in the {place} of {job.model.name}")
    return AdapterBase("bfloat16", f"{job.model.name} has {dtype or 'no dtype'} in its {place}")


def derived_base(job: Job) -> AdapterBase | None:
    """Return the dtype of the frozen weights, or None if the job sets it or has no adapters."""
    return default_base(job) if job.lora is not None and job.lora.base is None else None


def base_warnings(job: Job) -> Iterator[str]:
    """Yield a warning if `lora.base` is not the dtype of the checkpoint, or rounds its weights."""
    if job.lora is None or job.lora.is_quantized or not is_checkpoint(job.model):
        return
    checkpoint = pretrained(job.model)
    if _dequantized(checkpoint):
        return
    base = job.lora.base or default_base(job).dtype
    stored = checkpoint.dtype_of(files=True) or checkpoint.dtype_of(files=False)
    if stored in (None, base):
        return
    if base == "bfloat16":
        yield (
            f"lora.base=bfloat16 rounds the {stored} weights of {job.model.name}: export --merge writes the rounded "
            "weights, and PEFT computes with the original ones; lora.base=float32 keeps them"
        )
    else:
        yield (
            f"lora.base=float32 takes twice the memory of the {stored} weights of {job.model.name} and is not more "
            "precise; remove the key"
        )


def _dequantized(checkpoint: Pretrained) -> str | None:
    """Return the form of weights that are not stored as plain floats, or None."""
    if checkpoint.mxfp4:
        return "experts in MXFP4"
    if checkpoint.float8 is not None:
        return "FP8 weights"
    return "integers" if checkpoint.packed is not None else None
