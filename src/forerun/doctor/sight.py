"""What jax sees here, asked in a process of its own: a runtime that hangs or aborts must not take the doctor along.

`python -m forerun.doctor.sight` is that process; it chooses devices exactly as a job with `device: auto` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

ANSWER = "forerun-sight "


@dataclass(frozen=True)
class Sight:
    """`error` is set when there was no answer, and then nothing else is."""

    platform: str = ""
    kind: str = ""
    devices: int = 0
    processes: int = 0
    reason: str = ""
    warning: str | None = None
    error: str | None = None


def look(timeout_seconds: float = 120, command: tuple[str, ...] | None = None) -> Sight:
    """Start the process and read its answer."""
    started = command or (sys.executable, "-P", "-m", "forerun.doctor.sight")
    # The process finds forerun where we found it, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            started,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Sight(error=f"no answer from jax within {timeout_seconds:g} s")
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return Sight(**json.loads(line.removeprefix(ANSWER)))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return Sight(error=f"jax ended with code {done.returncode}: {last[:200]}")


def _seen() -> Sight:
    from forerun.hardware.devices import choose

    chosen = choose("auto", None)
    first = chosen.devices[0]
    processes = len({device.process_index for device in chosen.devices})
    return Sight(chosen.platform, first.device_kind, len(chosen.devices), processes, chosen.reason, chosen.warning)


if __name__ == "__main__":
    print(ANSWER + json.dumps(asdict(_seen())))
