"""Modules of `doctor` that run in a child process, which a runtime that hangs or aborts ends alone."""

from __future__ import annotations

import os
import subprocess
import sys


def run_module(
    module: str, timeout_seconds: float, command: tuple[str, ...] | None = None, **environment: str
) -> subprocess.CompletedProcess[str] | None:
    """Run a module, or `command` in place of it, and return its output; None if it exceeds the timeout."""
    # Pass the module path on, so that the child finds forerun even if it is not installed.
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.run(
            command or (sys.executable, "-P", "-m", module),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            env=os.environ | own | environment,
        )
    except subprocess.TimeoutExpired:
        return None


def ending_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return how a child process failed: its exit code and its last line."""
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return f"ended with code {done.returncode}: {last[:200]}"
