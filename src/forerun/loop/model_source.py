"""The SOURCE of `generate`, `chat` and `eval`: a run's folder, a folder with a checkpoint, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from forerun.config.schema import Model
from forerun.errors import UserError, did_you_mean
from forerun.hub import names


def checkpoint_section(source: str, revision: str | None = None) -> Model:
    """Return the model section of a source that is not a run: a checkpoint's folder or a name on the hub.

    `runs/name` has the form of a hub name. Where runs are, it means a run, and one that does not exist is an error.
    """
    name = f"./{source}" if "/" not in source and Path(source).is_dir() else source
    path = Path(source)
    beside = _runs_beside(path)
    if (beside or path.parent == Path("runs")) and not names.is_folder(name):
        near = did_you_mean(path.name, beside)
        raise UserError(
            f"there is no run {source}",
            why=f"runs in {path.parent}: {', '.join(beside[:10])}" if beside else f"{path.parent} contains no run",
            fix=f"did you mean {path.parent / near}?" if near else "name a run, a checkpoint's folder or a hub name",
        )
    if names.kind_of(name) not in ("repository", "folder"):
        raise UserError(
            f"{source} is no run and no checkpoint",
            why="looked for a job.yaml (a run of forerun) and for a config.json (a Hugging Face folder)",
            fix="give a folder under runs/, a checkpoint's folder, or a name on the hub such as owner/name",
        )
    return Model(name=name, revision=revision)


def _runs_beside(path: Path) -> list[str]:
    """Return the names of the runs in the folder that would contain `path`."""
    if path.parent in (Path(), Path("/")):
        return []
    try:
        return sorted(job.parent.name for job in path.parent.glob("*/job.yaml"))
    except OSError:
        return []
