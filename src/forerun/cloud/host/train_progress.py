"""The progress of training on this host, from the files of the run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainProgress:
    """What the run's folder tells about its progress. Only host 0 has these files.

    Attributes:
      step: the last finished step; None if it is not known.
      save_seconds: the time of the last save on the slowest host.
      program: the hash of the compiled program, or an empty string.
    """

    step: int | None = None
    save_seconds: float | None = None
    program: str = ""


def read_progress(run: Path, host: int) -> TrainProgress:
    """Return the progress of a host. Files that are missing or half written count as empty."""
    hosts = [entry for entry in _object(run / "hosts.json").get("hosts", ()) if isinstance(entry, dict)]
    steps = [entry.get("step") for entry in hosts if entry.get("index") == host]
    saves = [entry["save_seconds"] for entry in hosts if isinstance(entry.get("save_seconds"), int | float)]
    program = _object(run / "program.json").get("program")
    return TrainProgress(
        step=steps[0] if steps and isinstance(steps[0], int) else None,
        save_seconds=max(saves, default=None),
        program=program if isinstance(program, str) else "",
    )


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
