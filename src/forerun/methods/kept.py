"""Checkpoints with integer weights: whether a run keeps the codes and scales, and messages about it."""

from __future__ import annotations

from pathlib import Path

from forerun.models.model_facts import ModelFacts
from forerun.models.rounding import Rounding
from forerun.resolve.resolved_job import ResolvedJob


def kept_rounding(resolved: ResolvedJob) -> Rounding | None:
    """Return the rounding of the model's files if the run rounds its weights in the same way, or None."""
    checkpoint, qat = resolved.model_facts.checkpoint, resolved.job.qat
    rounding = None if checkpoint is None else checkpoint.rounding
    if rounding is None or qat is None or (rounding.bits, rounding.group) != (qat.bits, qat.group):
        return None
    return rounding


def adapter_inside(facts: ModelFacts) -> Path | None:
    """Return the folder of the adapter that an export wrote beside an integer base, or None."""
    if facts.checkpoint is None or facts.checkpoint.packed is None:
        return None
    folder = facts.checkpoint.snapshot.folder / "adapter"
    return folder if folder.is_dir() else None


def rounding_messages(resolved: ResolvedJob) -> list[tuple[str, bool]]:
    """Return messages about integer weights in the model's files, each with whether it is a warning."""
    job, checkpoint = resolved.job, resolved.model_facts.checkpoint
    if checkpoint is None or checkpoint.rounding is None:
        return []
    messages = []
    adapter = adapter_inside(resolved.model_facts)
    start = job.lora.start if job.lora is not None else None
    if adapter is not None and (start is None or Path(start).resolve() != adapter.resolve()):
        messages.append((f"the adapter in {adapter} is not applied; to start from it, set lora.start: {adapter}", True))
    integers = f"{job.model.name} has integers ({checkpoint.rounding})"
    if job.qat is not None:
        if kept_rounding(resolved) is not None:
            return [*messages, (f"{integers}: the run starts with their codes and scales", False)]
        rounding = Rounding(job.qat.bits, job.qat.group, job.qat.activations is not None)
        return [*messages, (f"{integers}, which are rounded again to {rounding}", True)]
    if job.lora is not None and job.lora.is_quantized:
        messages.append((f"{integers}, which are rounded again to {job.lora.base}; qat keeps them", True))
    elif checkpoint.packed is not None:
        messages.append((f"{integers}, which are read as floats; qat keeps them", True))
    return messages
