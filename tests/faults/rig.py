"""What the rigs share: one line of JSON per trial, and strace on a running process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 1200


def print_lines(lines: Iterable[dict[str, Any]]) -> int:
    """Print the line of each trial when the trial ends. Return the exit code, which is 0 if all trials are good."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the runs of the trial, too
    code = 0
    for line in lines:
        if not line.get("ok", line.get("exact")):
            code = 1
        print(json.dumps(line), flush=True)
    return code


def rig_lines(script: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a rig in a process that has run nothing on a device, because rigs fork. Return its lines."""
    ran = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def attached_strace(pid: int | None, calls: str, inject: str) -> subprocess.Popen[str]:
    """Let system calls of a process and its threads fail, wait or kill it, until the returned strace ends."""
    words = ["strace", "-f", "-p", str(pid), "-o", "/dev/null"]
    words += ["-e", f"trace={calls}", "-e", f"inject={calls}:{inject}"]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    return tracer
