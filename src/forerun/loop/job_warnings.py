"""What is probably a mistake in a job that could run: `check`, `data`, `plan` and `train` print it first."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.config.schema import Job
from forerun.models.pretrained import is_checkpoint, pretrained

HIGHEST_LR = 0.1


def warnings_of(job: Job) -> Iterator[str]:
    """Yield one line for each value that a user is likely to regret."""
    if job.optimizer.lr > HIGHEST_LR:
        yield (
            f"optimizer.lr={job.optimizer.lr:g} is implausibly high: AdamW changes every weight by about that much "
            "in each step; usual values are 1e-5 to 1e-2"
        )
    positions = trained_positions(job)
    if positions is not None and job.sequence > positions:
        yield (
            f"sequence={job.sequence} is longer than the {positions} positions that {job.model.name} was trained for "
            f"(max_position_embeddings): the run must teach it the rest; sequence={positions} avoids that"
        )


def trained_positions(job: Job) -> int | None:
    """Return how many positions a checkpoint was trained for; None for random weights, which know none yet.

    RoPE can compute any position. GPT-2 cannot: `concrete.require_positions` rejects a longer sequence.
    """
    if not is_checkpoint(job.model):
        return None
    config = pretrained(job.model).snapshot.json("config.json") or {}
    found = (config.get("text_config") or config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
