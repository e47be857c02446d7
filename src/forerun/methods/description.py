"""Descriptions of a job's methods, for `forerun check`. Does not import jax."""

from __future__ import annotations

from forerun.config.training_method import ALL_LINEAR
from forerun.resolve.resolved_job import ResolvedJob


def description(resolved: ResolvedJob) -> dict[str, str]:
    """Return one phrase for each method section of the job, by the name of the section."""
    job = resolved.job
    parts = {
        "lora": _lora(resolved),
        "qat": _qat(resolved),
        "distil": _distil(resolved),
        "preferences": _preferences(resolved),
    }
    if added := job.model.added_tokens:
        rows = "only their rows of the embedding are trained" if job.lora else "the resized embedding is trained"
        parts["new tokens"] = f"{len(added)} new tokens from id {job.model.first_new_token}; {rows}"
    if job.objective is not None:
        parts["objective"] = f"the loss is {job.objective.name}"
    return {name: text for name, text in parts.items() if text is not None}


def _lora(resolved: ResolvedJob) -> str | None:
    job = resolved.job
    if job.lora is None:
        return None
    kind = "DoRA adapters" if job.lora.dora else "adapters"
    base = f"the model is frozen in {job.lora.base or job.lora.resting}" if job.qat is None else "the model is frozen"
    start = f", they start from {job.lora.start}" if job.lora.start else ""
    return f"{kind} of rank {job.lora.rank} on {_targets(job.lora.targets)}{start}; {base}"


def _qat(resolved: ResolvedJob) -> str | None:
    job = resolved.job
    if job.qat is None:
        return None
    group = f"groups of {job.qat.group}" if job.qat.group else "one group per output"
    inputs = f", inputs as {job.qat.activations}" if job.qat.activations else ""
    return f"{_targets(job.qat.targets)} as {job.qat.weights} in {group}{inputs}, {job.qat.scales} scales"


def _distil(resolved: ResolvedJob) -> str | None:
    job = resolved.job
    if job.distil is None:
        return None
    where = f"its logits are cached in {job.distil.cache}" if job.distil.cache else "it runs in every step"
    return f"teacher {job.distil.teacher}, {where}; {100 * job.distil.soft:g} % of the loss is against it"


def _preferences(resolved: ResolvedJob) -> str | None:
    job = resolved.job
    if job.preferences is None:
        return None
    reference = job.preferences.reference_with(adapters=job.lora is not None)
    return f"{job.preferences.loss} with beta {job.preferences.beta:g}, reference {reference}"


def _targets(targets: str | tuple[str, ...]) -> str:
    return (
        "all linear weights" if targets == ALL_LINEAR else targets if isinstance(targets, str) else ", ".join(targets)
    )
