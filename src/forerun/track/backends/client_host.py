"""The program of the process in which the client of a tracker runs.

The command is `python -m forerun.track.backends.client_host NAME`.

It reads calls from its standard input and writes answers to its standard output. It ends when the input ends, which
also happens if the training process is killed. It then still delivers the rows that it has accepted.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from forerun.errors import first_line
from forerun.exit_codes import STOPPED
from forerun.track.tracker import TrackedRun

CLIENTS = {
    "wandb": ("forerun.track.backends.wandb_client", "WandbClient"),
    "trackio": ("forerun.track.backends.trackio_client", "TrackioClient"),
}
LOCK_SECONDS = 90.0  # until an earlier process of the same run must have ended
LAST_SECONDS = 60.0  # until this process ends after its input has ended


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
