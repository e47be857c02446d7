"""The weights alone of a run's newest checkpoint, for reading: nothing in the folder is touched, a run may go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as orbax

from forerun.errors import UserError


def newest_step(folder: Path) -> int:
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not steps:
        raise UserError(
            f"{folder.parent} has no checkpoint yet",
            why=f"{folder} is empty or missing",
            fix="train it first: forerun train job.yaml",
        )
    return max(steps)


def restore_weights(folder: Path, step: int, like: Any, *, part: str = "params") -> Any:
    """`part` of the state (params, or average) as the tree of `like`: shapes with shardings."""
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            restored = orbax.load((folder / str(step)).resolve(), {part: like})
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"the checkpoint of step {step} cannot be read",
            why=str(error).splitlines()[0][:300],
            fix=f"remove {folder / str(step)} to use the one before it",
        ) from error
    return restored[part]
