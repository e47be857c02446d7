"""Whether a run keeps the integers that its model's files have, and what the user is told about it."""

from __future__ import annotations

from pathlib import Path

from forerun.config.qat import Qat
from forerun.config.schema import Job, Model
from forerun.models.pretrained import is_checkpoint, pretrained
from forerun.models.rounding import Rounding


def kept_rounding(section: Model, qat: Qat) -> Rounding | None:
    """Return how the files of a model were rounded, if codes and scales of the job would be the same; else None."""
    found = pretrained(section).rounding if is_checkpoint(section) else None
    return found if found is not None and (found.bits, found.group) == (qat.bits, qat.group) else None


def adapter_inside(section: Model) -> Path | None:
    """Return the folder of the adapters that belong to a base of integers, if the model's folder has one."""
    if not is_checkpoint(section):
        return None
    found = pretrained(section)
    inside = found.snapshot.folder / "adapter"
    return inside if found.packed is not None and inside.is_dir() else None


def rounding_told(job: Job) -> list[tuple[str, bool]]:
    """Return what is to be said about integers in the model's files, each with whether it is a warning."""
    found = pretrained(job.model) if is_checkpoint(job.model) else None
    if found is None or found.rounding is None:
        return []
    told = []
    inside = adapter_inside(job.model)
    start = job.lora.start if job.lora is not None else None
    if inside is not None and (start is None or Path(start).resolve() != inside.resolve()):
        told.append((f"the adapter in {inside} is not applied; lora.start: {inside} begins with it", True))
    integers = f"{job.model.name} has integers ({found.rounding})"
    if job.qat is not None:
        if kept_rounding(job.model, job.qat) is not None:
            return [*told, (f"{integers}: the run begins with their codes and scales", False)]
        wanted = Rounding(job.qat.bits, job.qat.group, job.qat.activations is not None)
        return [*told, (f"{integers}, which are rounded again to {wanted}", True)]
    if job.lora is not None and job.lora.is_quantized:
        told.append((f"{integers}, which are rounded again to {job.lora.base}; qat keeps them", True))
    elif found.packed is not None:
        told.append((f"{integers}, which are read as floats; qat keeps them", True))
    return told
