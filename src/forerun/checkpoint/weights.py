"""The weights alone of a run's newest good checkpoint, for reading: a run may go on meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from forerun.checkpoint.reader import Reader
from forerun.errors import UserError


def newest_step(folder: Path | str) -> int:
    """The step of the newest checkpoint whose files are what was committed; damaged ones are passed over."""
    reader = Reader(folder)
    found = reader.newest_good()
    if found is None:
        raise UserError(
            f"{str(folder).rpartition('/')[0]} has no checkpoint yet",
            why=f"{folder} is empty or missing",
            fix="train it first: forerun train job.yaml",
        )
    return found


def chosen_step(folder: Path | str, which: str) -> int:
    """`newest`, `best` (the lowest loss on the validation, or on the training data where there is none; of those that
    are kept), or a number. Its files are verified when it is read."""
    if which == "newest":
        return newest_step(folder)
    reader = Reader(folder)
    if which != "best":
        return reader.commit(int(which)).step
    losses = {step: reader.record(step).get("loss") for step in reader.steps()}
    known = {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    if not known:
        raise UserError(
            f"no checkpoint of {folder} has a loss to choose the best by",
            why=f"checkpoints: {', '.join(map(str, losses)) or 'none'}",
            fix="leave --step out: the newest is taken",
        )
    return min(known, key=lambda step: (known[step], -step))


def restore_weights(folder: Path | str, step: int, like: Any, *, part: str = "params") -> Any:
    """`part` of the state (params, or average) as the tree of `like`: shapes with shardings. Verified."""
    return Reader(folder).restore(step, like, part=part)
