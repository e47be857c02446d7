"""Trackers whose client runs in a separate process: wandb and trackio.

These clients replace `sys.exit`, register functions for the end of the process, start threads, and take seconds to
import. In a separate process they cannot change, delay or stop the training process.
`forerun.track.backends.client_host` is the program of that process. The two processes exchange one line of JSON for
each call and one for each answer.
"""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from forerun.errors import UserError
from forerun.installation import install_command
from forerun.track.tracker import ConnectionLost, Row, TrackedRun

BEGIN_SECONDS = 180.0  # a cold import of a client takes up to 30 s, and wandb.init up to 90 s
SEND_SECONDS = 60.0
END_SECONDS = 60.0  # until the end of a run no longer waits for the start of a client, or for the last upload


def require_client(name: str) -> None:
    """Raise UserError if the package of the client is not installed. The package is not imported."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            "E-TRACK-007",
            f"track.to: {name} is not installed",
            why=f"No module named {name!r}",
            fix=f"{install_command(name)}; or remove it from track.to",
        )


class ClientError(OSError):
    """An error that the client reported."""


class ClientProcess:
    """A tracker whose client runs in a separate process.

    Args:
        name: The name of the client, which is also the name of its package.
        options: The arguments of the client's class.
    """

    end_seconds = END_SECONDS

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, dict(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def begin(self, run: TrackedRun) -> int | None:
        """Start the process, and return the last step that the tracker has, or None if it cannot know."""
        self._stop()
        command = [sys.executable, "-P", "-m", "forerun.track.backends.client_host", self._name]
        # A new session: the terminal sends Ctrl-C to the training process only, which then ends the client in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        about = {"name": run.name, "folder": str(run.folder), "token": run.token, "job": dict(run.job)}
        last = self._ask({"call": "begin", "options": self._options, "run": about}, BEGIN_SECONDS)
        return None if last is None else int(last)

    def send(self, rows: Sequence[Row]) -> None:
        self._ask({"call": "send", "rows": [dict(row) for row in rows]}, SEND_SECONDS)

    def end(self, finished: bool) -> None:
        """Wait until the client has delivered everything, and end the process."""
        try:
            self._ask({"call": "end", "finished": finished}, END_SECONDS)
        finally:
            self._stop()

    def close(self) -> None:
        """Ask the process to end after the rows that it has accepted. This does not wait."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _ask(self, call: Mapping[str, Any], seconds: float) -> Any:
        """Send a call and return the result.

        Raises:
            ClientError: The client reports an error.
            ConnectionLost: The process ended, or did not answer in time. It is stopped.
        """
        with self._lock:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise ConnectionLost(f"the process of the {self._name} client has ended")
            try:
                process.stdin.write(json.dumps(call, default=str).encode() + b"\n")
                process.stdin.flush()
                line = _line(process.stdout, seconds)
            except (OSError, ValueError) as error:  # ValueError: a pipe is closed
                self._stop()
                raise ConnectionLost(f"the process of the {self._name} client has ended") from error
            if line is None:
                self._stop()
                raise ConnectionLost(f"no answer of the {self._name} client within {seconds:g} s")
            if not line.endswith(b"\n"):
                code = process.wait()
                self._stop()
                raise ConnectionLost(f"the process of the {self._name} client ended with code {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["result"]

    def _stop(self) -> None:
        """Close the pipes, which asks the process to end, and kill it if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(pipe: IO[bytes], seconds: float) -> bytes | None:
    """Return the next line of a pipe, or None if it does not begin in time.

    The process writes each line in one call, so a line that has begun is complete soon.
    """
    ready, _, _ = select.select([pipe], [], [], seconds)
    return pipe.readline() if ready else None
