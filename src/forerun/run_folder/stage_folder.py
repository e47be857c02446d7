"""`runs/NAME/stages.json`: the runs of a job file with stages, so that `runs/NAME` means the last of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from forerun.config.stages import Stage
from forerun.errors import UserError, did_you_mean
from forerun.files import atomic_write

STAGES = "stages.json"


def write_stage_names(stages: Sequence[Stage]) -> None:
    """Write the names of the stages and of their runs. The first name of the file's runs is that of its folder."""
    first = stages[0]
    name = first.job.name.removesuffix(f"-{first.name}")
    content = {"stages": {stage.name: stage.job.name for stage in stages}}
    file = Path(first.job.runs) / name / STAGES
    if file.with_name("job.yaml").exists():
        raise UserError(
            "E-RUN-065",
            f"{file.parent} is the run of a job without stages",
            why=f"it has a job.yaml, and {STAGES} is written there, so that {file.parent} means the last stage",
            fix="give this job another name (name=...), or move the folder",
        )
    text = json.dumps(content, indent=2) + "\n"
    if not file.is_file() or file.read_text("utf-8") != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text)


def run_of(source: str | Path, stage: str | None = None) -> Path:
    """Return the folder of a run: `source` itself, or the run of a stage if `source` is the folder of stages.

    Args:
      source: the folder of a run, or of a job file with stages.
      stage: the stage; default: the last one.

    Raises:
      UserError: there is no such stage, or it was not started.
    """
    path = Path(source)
    if path.name in ("", ".."):  # a place such as `.` has no name, and its parent is not the folder of the runs
        path = path.absolute().resolve()
    runs = _runs(path)
    if runs is None:
        if stage is not None:
            raise UserError(
                "E-RUN-062",
                f"{path} has no stages",
                why=f"there is no {path / STAGES}",
                fix="remove --stage; the folder of a job file with stages is runs/NAME, without the name of a stage",
            )
        return path
    started = [name for name in runs if (path.parent / runs[name] / "job.yaml").is_file()]
    chosen = stage or list(runs)[-1]
    if chosen not in started:
        near = did_you_mean(chosen, started) if chosen not in runs else None
        others = f"; of started stages, the runs are {', '.join(str(path.parent / runs[name]) for name in started)}"
        raise UserError(
            "E-RUN-063",
            f"{path} has no run of stage {chosen!r}",
            why=f"stages: {', '.join(runs)}; started: {', '.join(started) or 'none'}",
            fix=f"did you mean '{near}'?" if near else f"train it first: forerun train{others if started else ''}",
        )
    return path.parent / runs[chosen]


def _runs(path: Path) -> dict[str, str] | None:
    """Return the runs by stage, or None if the folder is not that of a file with stages."""
    if (path / "job.yaml").exists() or not (path / STAGES).is_file():
        return None
    try:
        found = json.loads((path / STAGES).read_text("utf-8"))["stages"]
        return {str(name): str(run) for name, run in found.items() if "/" not in str(run)}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(
            "E-RUN-064",
            f"{path / STAGES} cannot be read",
            why="it is not the file that forerun train wrote",
            fix="remove it, and run forerun train again: it writes the file first",
        ) from None
