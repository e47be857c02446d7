"""The weights alone of a run's newest good checkpoint, for reading: a run may go on meanwhile."""

from __future__ import annotations

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


def restore_weights(folder: Path | str, step: int, like: Any, *, part: str = "params") -> Any:
    """`part` of the state (params, or average) as the tree of `like`: shapes with shardings. Verified."""
    return Reader(folder).restore(step, like, part=part)
