"""A machine of the fake cloud that trains a job from its start on, without an agent."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class TrainingMachine:
    """Runs `forerun train` when a slice starts, and writes its exit code to a file when it has ended.

    Args:
      arguments: of `forerun train`.
      folder: where it runs, with `train.log` and `exit_code`.
    """

    def __init__(self, arguments: Sequence[str], folder: str) -> None:
        self._command = [sys.executable, "-P", "-m", "forerun", "train", *arguments]
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, slice_name: str, zone: str, hosts: int, metadata: Mapping[str, str], accelerator: str) -> None:
        assert hosts == 1
        with (self._folder / "train.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        return [("127.0.0.1", "127.0.0.1")]

    def host_keys(self, slice_name: str) -> list[list[str]]:
        return []

    def notice(self, slice_name: str) -> None:
        pass

    def stop(self, slice_name: str, *, kill: bool) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                return
            self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            (self._folder / "exit_code").write_text(str(self._process.wait(120)))

    def close(self) -> None:
        self.stop("", kill=True)
