"""The progress of training on this host, from the files of the run's folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cloud.deadline import credible_save_seconds

MOST_BYTES = 16 << 20
MOST_STEPS = 10**15
_PROGRAM = re.compile(r"[0-9a-zA-Z]{1,100}")


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
    """Return the progress of a host. Files and values that are missing, damaged or not credible count as empty."""
    entries = _object(run / "hosts.json").get("hosts")
    hosts = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    steps = [entry.get("step") for entry in hosts if entry.get("index") == host]
    saves = [seconds for entry in hosts if (seconds := credible_save_seconds(entry.get("save_seconds"))) is not None]
    program = _object(run / "program.json").get("program")
    return TrainProgress(
        step=steps[0] if steps and _is_count(steps[0]) else None,
        save_seconds=max(saves, default=None),
        program=program if isinstance(program, str) and _PROGRAM.fullmatch(program) else "",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS


def _object(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
