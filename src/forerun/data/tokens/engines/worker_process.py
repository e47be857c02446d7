"""A worker process (`worker.py`) as its parent sees it: units go in, messages come out, and a death has a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun import version
from forerun.data.tokens.memory import is_exhausted
from forerun.data.tokens.unit import Unit
from forerun.interrupt import children_without_ctrl_c

# With a backtrace, Rust needs half a minute to report a failed allocation.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
WORKER = ("-P", "-m", "forerun.data.tokens.worker")
SAID_CHARACTERS = 2000  # of the last output on stderr that a message about a death contains


class WorkerProcess:
    """A running worker process. It exits when this process ends, because its stdin is then closed.

    `folder` is its working folder, by default that of this process.
    """

    def __init__(self, task: dict[str, Any], folder: str | None = None) -> None:
        self._task: dict[str, Any] | None = task
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # until `_end`
        with children_without_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env=_environment(),
                cwd=folder,
            )

    def messages(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        """Build a unit, and yield the kind and the content of each message about it.

        The last message is not `progress`. It is `died` if the process ended without a final message, with its exit
        code, its last output on stderr, and whether an allocation of memory failed. The process is stopped then.
        """
        assert self._process.stdout is not None
        self._send(unit)
        for line in self._process.stdout:
            try:
                ((kind, content),) = json.loads(line).items()
            except ValueError:  # the process died in the middle of a line
                break
            yield kind, content
            if kind != "progress":
                return
        code, said = self._end()
        yield "died", {"code": code, "said": said[-SAID_CHARACTERS:], "no_memory": is_exhausted(code, said)}

    def kill(self) -> None:
        """Kill the process. Safe from any thread; `messages` then yields `died`."""
        self._process.kill()

    def stop(self) -> None:
        """Let the process exit, and wait for it."""
        self._end()

    def _send(self, unit: Unit) -> None:
        """Write a unit to the process, and before the first unit the task."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            if self._task is not None:
                task, self._task = self._task, None
                self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.write(json.dumps(unit.to_json()) + "\n")
            self._process.stdin.flush()

    def _end(self) -> tuple[int, str]:
        """Close stdin, which makes the process exit, and return its exit code and its output on stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        if self._stderr.closed:
            return code, ""
        with self._stderr:
            self._stderr.seek(0)
            return code, self._stderr.read()


def _environment() -> dict[str, str]:
    """Return the environment of a worker, in which this version of forerun can be imported."""
    package = str(Path(version.__file__).parent.parent)
    path = dict.fromkeys([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | QUIET
