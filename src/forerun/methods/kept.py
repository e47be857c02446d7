"""Checkpoints with integer weights: whether a run keeps the codes and scales, and messages about it."""

from __future__ import annotations

from pathlib import Path

from forerun.config.methods.qat import Qat
from forerun.config.schema import Job, Model
from forerun.models.pretrained import is_checkpoint, pretrained
from forerun.models.rounding import Rounding


def kept_rounding(section: Model, qat: Qat) -> Rounding | None:
    """Return the rounding of a model's files if it is the same as that of the job, or None."""
    found = pretrained(section).rounding if is_checkpoint(section) else None
    return found if found is not None and (found.bits, found.group) == (qat.bits, qat.group) else None


def keeps_rounding(job: Job) -> bool:
    """Return whether a run rounds its weights in the same way as the files of its model."""
    return job.qat is not None and kept_rounding(job.model, job.qat) is not None


def adapter_inside(section: Model) -> Path | None:
    """Return the folder of the adapter that an export wrote beside an integer base, or None."""
    if not is_checkpoint(section):
        return None
    found = pretrained(section)
    inside = found.snapshot.folder / "adapter"
    return inside if found.packed is not None and inside.is_dir() else None


def rounding_messages(job: Job) -> list[tuple[str, bool]]:
    """Return messages about integer weights in the model's files, each with whether it is a warning."""
    found = pretrained(job.model) if is_checkpoint(job.model) else None
    if found is None or found.rounding is None:
        return []
    told = []
    inside = adapter_inside(job.model)
    start = job.lora.start if job.lora is not None else None
    if inside is not None and (start is None or Path(start).resolve() != inside.resolve()):
        told.append((f"the adapter in {inside} is not applied; to start from it, set lora.start: {inside}", True))
    integers = f"{job.model.name} has integers ({found.rounding})"
    if job.qat is not None:
        if kept_rounding(job.model, job.qat) is not None:
            return [*told, (f"{integers}: the run starts with their codes and scales", False)]
        wanted = Rounding(job.qat.bits, job.qat.group, job.qat.activations is not None)
        return [*told, (f"{integers}, which are rounded again to {wanted}", True)]
    if job.lora is not None and job.lora.is_quantized:
        told.append((f"{integers}, which are rounded again to {job.lora.base}; qat keeps them", True))
    elif found.packed is not None:
        told.append((f"{integers}, which are read as floats; qat keeps them", True))
    return told
