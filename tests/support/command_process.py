"""`forerun` in a process of its own, as users run it. The compilers of a plan are children of that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 1200


def run_forerun(*words: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, and return its exit code and both outputs."""
    return subprocess.run(
        [sys.executable, "-m", "forerun", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def output_of(*words: object, folder: Path = ROOT) -> str:
    """Return what a command prints, which must succeed."""
    done = run_forerun(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def planned_slices(*words: object, folder: Path = ROOT) -> list[dict[str, Any]]:
    """Return the slices of `forerun plan ... --json`, which must succeed."""
    slices: list[dict[str, Any]] = json.loads(output_of("plan", *words, "--json", folder=folder))["slices"]
    return slices
