"""Trackers whose client runs in a separate process: wandb and trackio.

These clients replace `sys.exit`, register functions for the end of the process, start threads, and take seconds to
import. In a separate process they cannot change, delay or stop the training process.
This module is also the program of that process: `python -m forerun.track.backends.client_process NAME`. The two
processes exchange one line of JSON for each call and one for each answer.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from forerun.errors import UserError, first_line
from forerun.exit_codes import STOPPED
from forerun.installation import install_command
from forerun.track.tracker import ConnectionLost, Row, TrackedRun

BEGIN_SECONDS = 180.0  # a cold import of a client takes up to 30 s, and wandb.init up to 90 s
SEND_SECONDS = 60.0
END_SECONDS = 60.0  # until the end of a run no longer waits for the start of a client, or for the last upload
CLIENTS = {
    "wandb": ("forerun.track.backends.wandb", "WandbClient"),
    "trackio": ("forerun.track.backends.trackio", "TrackioClient"),
}
LOCK_SECONDS = 90.0  # until an earlier process of the same run must have ended
LAST_SECONDS = 60.0  # until this process ends after its input has ended


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
        command = [sys.executable, "-P", "-m", "forerun.track.backends.client_process", self._name]
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


# ---- The program of the client's process ----
#
# It reads calls from its standard input and writes answers to its standard output. It ends when the input ends, which
# also happens if the training process is killed. It then still delivers the rows that it has accepted.


class Host:
    """The state of the process: the client, and the lock that prevents two clients of one run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._client: Any = None
        self._lock: IO[bytes] | None = None

    def answer(self, call: Mapping[str, Any]) -> Any:
        """Make a call of the client and return its result."""
        if call["call"] == "begin":
            about = call["run"]
            run = TrackedRun(about["name"], Path(about["folder"]), about["token"], about["job"])
            self._take_lock(run.folder)
            module, class_name = CLIENTS[self._name]
            self._client = getattr(importlib.import_module(module), class_name)(**call["options"])
            return self._client.begin(run)
        if call["call"] == "send":
            return self._client.send(call["rows"])
        client, self._client = self._client, None
        return client.end(call["finished"])

    def close(self) -> None:
        """Deliver accepted rows after the training process has ended without a call of `end`."""
        if self._client is not None:
            with suppress(Exception):
                self._client.end(False)

    def _take_lock(self, folder: Path) -> None:
        """Wait until the process of an earlier, killed run has delivered its rows.

        Without the lock, its last rows could arrive after this process has asked for the last step. They would then be
        sent twice.
        """
        if self._lock is not None:
            return
        try:
            lock = open(folder / f".{self._name}.lock", "wb")  # noqa: SIM115  (held until the process ends)
        except OSError:  # such as a folder on a full disk
            return
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process sends rows of this run") from None
                time.sleep(0.1)
            except OSError:  # the file system has no locks
                return


def main(name: str) -> int:
    """Answer calls until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # clients print to the standard output
    host = Host(name)
    for line in _lines():
        try:
            answer = {"result": host.answer(json.loads(line))}
        except Exception as error:
            answer = {"error": first_line(error)}
        with suppress(OSError):  # the training process has ended
            answers.write(json.dumps(answer).encode() + b"\n")
    host.close()
    return 0


def _lines() -> Any:
    """Yield the lines of the standard input. A thread reads it, to notice its end during a call."""
    import queue

    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        lines.put(None)
        time.sleep(LAST_SECONDS)
        os._exit(STOPPED)

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


if __name__ == "__main__":
    # Functions that the clients register for the end of the process may wait for a server without a limit.
    code = main(sys.argv[1])
    os._exit(code)
