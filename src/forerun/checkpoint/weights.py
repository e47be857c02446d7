"""Weights of a run's checkpoints, for commands that only read them. The run may continue meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from forerun.checkpoint.reader import Reader
from forerun.errors import UserError


def newest_step(folder: Path | str) -> int:
    """Return the step of the newest checkpoint that is not damaged. Raise UserError if the run has no checkpoint.

    If all checkpoints are damaged, this is the newest one, and reading it reports the damage.
    """
    reader = Reader(folder)
    found = reader.newest_good()
    if found is None:
        raise UserError(
            "E-CHECKPOINT-013",
            f"{str(folder).rpartition('/')[0]} has no checkpoint yet",
            why=f"{folder} is empty or missing",
            fix="train it first: forerun train job.yaml",
        )
    return found


def chosen_step(folder: Path | str, which: str) -> int:
    """Return the step that `--step` selects. Its files are verified when it is read.

    Args:
      folder: the folder of the checkpoints.
      which: `newest`, `best`, or the number of a step. The best is the kept checkpoint with the lowest recorded loss,
        which is that of the validation, or of the training if the job has no validation data.

    Raises:
      UserError: there is no such checkpoint, or none has a loss.
    """
    if which == "newest":
        return newest_step(folder)
    reader = Reader(folder)
    if which != "best":
        return reader.commit(int(which)).step
    losses = {step: reader.record(step).get("loss") for step in reader.steps()}
    known = {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    if not known:
        raise UserError(
            "E-CHECKPOINT-014",
            f"no checkpoint of {folder} has a loss to choose the best by",
            why=f"checkpoints: {', '.join(map(str, losses)) or 'none'}",
            fix="omit --step to use the newest checkpoint",
        )
    return min(known, key=lambda step: (known[step], -step))


def restore_weights(folder: Path | str, step: int, like: Any, *, part: str = "params") -> Any:
    """Return a part of the state of `step`, after its files were verified.

    Args:
      folder: the folder of the checkpoints.
      step: the step of the checkpoint.
      like: a tree of shapes with shardings, whose structure the result has.
      part: `params` or `average`.
    """
    return Reader(folder).restore(step, like, part=part)
