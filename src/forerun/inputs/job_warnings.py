"""Warnings about valid jobs that are probably mistakes. `check`, `data`, `plan` and `train` print them first."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.config.methods.targets import ALL_LINEAR
from forerun.config.optimizer import ADAMW, ADAMW8BIT, LION, MUON
from forerun.config.schema import Job
from forerun.data.reads.cache_size import bucket_cache
from forerun.errors import UserError
from forerun.methods.adapter_base import base_warnings
from forerun.models.pretrained import is_checkpoint, pretrained

HIGHEST_LR = 0.1


def warnings_of(job: Job) -> Iterator[str]:
    """Yield a warning for each value that is probably a mistake."""
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
    yield from base_warnings(job)
    form = _dequantized(job)
    if form is not None:
        yield (
            f"{job.model.name} has {form}: forerun dequantizes them to bfloat16 and trains those; an "
            "export has bfloat16 weights and no quantization_config"
        )
    positions = trained_positions(job)
    if positions is not None and job.sequence > positions:
        yield (
            f"sequence={job.sequence} is longer than the {positions} positions that {job.model.name} was trained for "
            f"(max_position_embeddings): it has to learn the other positions; sequence={positions} avoids that"
        )
    if (text := _bare_layers(job)) is not None:
        yield text


def _dequantized(job: Job) -> str | None:
    """Return the form of the weights that are dequantized when they are read, or None."""
    if not is_checkpoint(job.model):
        return None
    found = pretrained(job.model)
    if found.mxfp4:
        return "experts in MXFP4"
    return None if found.float8 is None else f"FP8 weights ({found.float8})"


def _bare_layers(job: Job) -> str | None:
    """Return a warning if the adapters of a checkpoint leave out layers, or None.

    Layers of one model have different matrices in hybrid families, so that `q_proj` can be in a quarter of them.
    """
    adapter = job.method.adapter
    if adapter is None or ALL_LINEAR in adapter.patterns or not is_checkpoint(job.model):
        return None
    from forerun.methods.target_matches import job_coverage  # imports jax, which a plan of a named model avoids

    try:
        coverage = job_coverage(job)
    except UserError:
        return None  # the command reports it when it builds the program
    return coverage.warning if coverage else None


def trained_positions(job: Job) -> int | None:
    """Return the number of positions that a checkpoint was trained for, or None for random weights.

    RoPE can compute any position. GPT-2 cannot, so `resolve_job.require_positions` rejects a longer sequence.
    """
    if not is_checkpoint(job.model):
        return None
    config = pretrained(job.model).snapshot.json("config.json") or {}
    found = (config.get("text_config") or config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
