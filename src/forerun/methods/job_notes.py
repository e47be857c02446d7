"""Texts about a valid job for its user: warnings and descriptions. Importing this module does not import jax.

`check`, `data`, `plan` and `train` print the warnings first.
"""

from __future__ import annotations

from collections.abc import Iterator

from forerun.config.optimizer import ADAMW, ADAMW8BIT, LION, MUON
from forerun.config.training_method import ALL_LINEAR
from forerun.data.reads.cache_size import bucket_cache
from forerun.errors import UserError
from forerun.resolve.resolve_model import default_base, dequantized_form
from forerun.resolve.resolved_job import ResolvedJob

HIGHEST_LR = 0.1


def warnings_of(resolved: ResolvedJob) -> Iterator[str]:
    """Yield a warning for each value that is probably a mistake."""
    job = resolved.job
    if job.optimizer.lr > HIGHEST_LR and job.optimizer.name in (ADAMW, ADAMW8BIT, LION, MUON):
        yield (
            f"optimizer.lr={job.optimizer.lr:g} is implausibly high: {job.optimizer.name} changes every weight by "
            "about that much in each step; usual values are 1e-5 to 1e-2"
        )
    if job.data.feeders:
        yield (
            f"data.feeders={job.data.feeders} has no effect: forerun builds batches in a thread now, not in "
            "processes; remove the key"
        )
    cache = bucket_cache(job.data)
    if cache is not None and cache.warning is not None:
        yield cache.warning
    yield from _base_warnings(resolved)
    form = _low_precision_form(resolved)
    if form is not None:
        yield (
            f"{job.model.name} has {form}: forerun dequantizes them to bfloat16 and trains those; an "
            "export has bfloat16 weights and no quantization_config"
        )
    positions = _trained_positions(resolved)
    if positions is not None and job.sequence > positions:
        yield (
            f"sequence={job.sequence} is longer than the {positions} positions that {job.model.name} was trained for "
            f"(max_position_embeddings): it has to learn the other positions; sequence={positions} avoids that"
        )
    if (text := _bare_layers(resolved)) is not None:
        yield text


def _base_warnings(resolved: ResolvedJob) -> Iterator[str]:
    """Yield a warning if `lora.base` is not the dtype of the checkpoint, or rounds its weights."""
    lora, checkpoint, name = resolved.job.lora, resolved.model_facts.checkpoint, resolved.job.model.name
    if lora is None or lora.is_quantized or checkpoint is None or dequantized_form(checkpoint):
        return
    base = lora.base or default_base(resolved.model_facts).dtype
    stored = checkpoint.dtype_of(files=True) or checkpoint.dtype_of(files=False)
    if stored in (None, base):
        return
    if base == "bfloat16":
        yield (
            f"lora.base=bfloat16 rounds the {stored} weights of {name}: export --merge writes the rounded "
            "weights, and PEFT computes with the original ones; lora.base=float32 keeps them"
        )
    else:
        yield (
            f"lora.base=float32 takes twice the memory of the {stored} weights of {name} and is not more "
            "precise; remove the key"
        )


def _low_precision_form(resolved: ResolvedJob) -> str | None:
    """Return the form of the weights that are dequantized when they are read, or None."""
    checkpoint = resolved.model_facts.checkpoint
    if checkpoint is None:
        return None
    if checkpoint.mxfp4:
        return "experts in MXFP4"
    return None if checkpoint.float8 is None else f"FP8 weights ({checkpoint.float8})"


def _bare_layers(resolved: ResolvedJob) -> str | None:
    """Return a warning if the adapters of a checkpoint leave out layers, or None.

    Layers of one model have different matrices in hybrid families, so that `q_proj` can be in a quarter of them.
    """
    adapter = resolved.job.method.adapter
    if adapter is None or ALL_LINEAR in adapter.patterns or not resolved.model_facts.is_checkpoint:
        return None
    from forerun.methods.target_matches import job_coverage  # imports jax, which a plan of a named model avoids

    try:
        coverage = job_coverage(resolved)
    except UserError:
        return None  # the command reports it when it builds the program
    return coverage.warning if coverage else None


def _trained_positions(resolved: ResolvedJob) -> int | None:
    """Return the number of positions that a checkpoint was trained for, or None for random weights.

    RoPE can compute any position. GPT-2 cannot, so `require_positions` rejects a longer sequence.
    """
    snapshot = resolved.model_facts.snapshot
    if snapshot is None:
        return None
    config = snapshot.json("config.json") or {}
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else None


# ---- Descriptions for `forerun check` ----


def description(resolved: ResolvedJob) -> dict[str, str]:
    """Return one phrase for each method section of the job, by the name of the section."""
    job, phrases = resolved.job, {}
    if job.lora is not None:
        kind = "DoRA adapters" if job.lora.dora else "adapters"
        start = f", they start from {job.lora.start}" if job.lora.start else ""
        form = "" if job.qat is not None else f" in {job.lora.base or job.lora.resting}"
        targets = _target_names(job.lora.targets)
        phrases["lora"] = f"{kind} of rank {job.lora.rank} on {targets}{start}; the model is frozen{form}"
    if job.qat is not None:
        group = f"groups of {job.qat.group}" if job.qat.group else "one group per output"
        inputs = f", inputs as {job.qat.activations}" if job.qat.activations else ""
        targets = _target_names(job.qat.targets)
        phrases["qat"] = f"{targets} as {job.qat.weights} in {group}{inputs}, {job.qat.scales} scales"
    if job.distil is not None:
        where = f"its logits are cached in {job.distil.cache}" if job.distil.cache else "it runs in every step"
        share = f"{100 * job.distil.soft:g} % of the loss is against it"
        phrases["distil"] = f"teacher {job.distil.teacher}, {where}; {share}"
    if (pairs := job.preferences) is not None:
        reference = pairs.reference_with(adapters=job.lora is not None)
        phrases["preferences"] = f"{pairs.loss} with beta {pairs.beta:g}, reference {reference}"
    if added := job.model.added_tokens:
        rows = "only their rows of the embedding are trained" if job.lora else "the resized embedding is trained"
        phrases["new tokens"] = f"{len(added)} new tokens from id {job.model.first_new_token}; {rows}"
    if job.objective is not None:
        phrases["objective"] = f"the loss is {job.objective.name}"
    return phrases


def _target_names(targets: str | tuple[str, ...]) -> str:
    if targets == ALL_LINEAR:
        return "all linear weights"
    return targets if isinstance(targets, str) else ", ".join(targets)
