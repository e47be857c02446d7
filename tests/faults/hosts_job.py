"""A job on several hosts of this one machine: real processes on loopback, and what they wrote down."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
# A machine that is busy, or whose disk stands still for a while, is no fault of a host.
PATIENT = {"grace": 60, "gather": 120, "handshake": 60, "lost": 60, "stall_floor": 60}


class HostsJob:
    def __init__(
        self,
        folder: Path,
        hosts: int,
        *,
        kind: str = "barrier",
        steps: int = 60,
        every: int = 5,
        step_seconds: float = 0.02,
        fault: str = "",
        limits: dict[str, Any] | None = None,
        leader: str = "127.0.0.1",
        within: Callable[[int], list[str]] = lambda index: [],
    ) -> None:
        self.leader, self.within = leader, within
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.hosts, self.steps = folder, hosts, steps
        self.limits = {"grace": 20, "gather": 60, **(limits or {})}
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(16))
        self.secret.chmod(0o600)
        self._reserved = reserved_port(leader if leader.startswith("127.") else "127.0.0.1")
        self.port = int(self._reserved.getsockname()[1])
        self.command = [sys.executable, str(HERE / "hosts_worker.py"), kind, str(folder), str(steps), str(every)]
        self.command.append(str(step_seconds))
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"},
            "PYTHONPATH": str(SOURCE),
            "FAULT": fault,
            "FORERUN_METADATA_URL": "http://127.0.0.1:9",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_PLATFORMS": "cpu",
        }
        self.supervisors: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int, *, secret: Path | None = None, **others: Any) -> subprocess.Popen[bytes]:
        port = others.pop("port", self.port)
        hosts = {"index": index, "count": self.hosts, "leader": self.leader, "port": port}
        given = {
            "command": self.command,
            "hosts": {**hosts, **others.pop("hosts", {})},
            "folder": str(self.folder),
            "secret": str(secret or self.secret),
            "identity": {"job": "1", **others.pop("identity", {})},
            "limits": self.limits,
        }
        name = others.pop("name", f"supervisor-{index}")
        words = [*self.within(index), sys.executable, str(HERE / "hosts_supervisor.py"), json.dumps(given)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env={**self.environment, **others})
        self.supervisors[len(self.supervisors) if name != f"supervisor-{index}" else index] = process
        return process

    def start_all(self) -> Self:
        for index in range(self.hosts):
            self.start(index)
        return self

    def wait(self, seconds: float = 900) -> list[int]:
        """Exit codes of the supervisors, in the order of their hosts."""
        deadline = time.monotonic() + seconds
        try:
            return [
                self.supervisors[index].wait(max(0.1, deadline - time.monotonic()))
                for index in sorted(self.supervisors)
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds} s\n{self.said()}") from None

    def said(self, index: int | None = None) -> str:
        files = sorted(self.folder.glob("*.log")) if index is None else [self.folder / f"supervisor-{index}.log"]
        return "\n".join(file.read_text() for file in files)

    def notes(self, kind: str, host: int | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """What the workers wrote down."""
        found = []
        for file in sorted(self.folder.glob("host-*.jsonl")):
            for note in whole_lines(file):
                if note["kind"] == kind and host in (None, note["host"]):
                    found.append(note)
        return [note for note in found if all(note.get(key) == value for key, value in wanted.items())]

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What the leader wrote down."""
        return [line for line in whole_lines(self.folder / "supervise" / "log.jsonl") if line["kind"] == kind]

    def until(self, kind: str, host: int | None = None, seconds: float = 900, **wanted: Any) -> dict[str, Any]:
        """The first such note of the workers."""
        deadline = time.monotonic() + seconds
        while not (found := self.notes(kind, host, **wanted)):
            assert time.monotonic() < deadline, f"no '{kind}' {wanted} of host {host}\n{self.said()}"
            dead = [index for index, child in self.supervisors.items() if child.poll() is not None]
            assert not dead, f"supervisors {dead} have left\n{self.said()}"
            time.sleep(0.02)
        return found[0]

    def pid(self, host: int, attempt: int = 1) -> int:
        return int(self.until("pid", host, attempt=attempt)["pid"])

    def values(self) -> dict[int, str]:
        """After each step; all hosts and attempts must tell the same."""
        found: dict[int, str] = {}
        for note in self.notes("step"):
            assert found.setdefault(note["step"], note["value"]) == note["value"], f"two values of step {note['step']}"
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self.supervisors.values())
        self._reserved.close()


class PatientJob(HostsJob):
    """For tests, which pass on any machine: none of the limits is short but those that the test is about."""

    def __init__(self, folder: Path, hosts: int, *, limits: dict[str, Any] | None = None, **others: Any) -> None:
        super().__init__(folder, hosts, limits={**PATIENT, **(limits or {})}, **others)


def reserved_port(address: str) -> socket.socket:
    """Return a bound socket: until it is closed, the kernel gives its port to nobody but a server with SO_REUSEADDR."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """Of a file to which somebody appends: its last line may be half there."""
    content = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Whatever state they are in."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def listened_on(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports of the TCP sockets on which a process listens."""
    mine = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            mine.add(os.readlink(entry.path))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                raw = bytes.fromhex(address)
                words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                text = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
                yield text.removeprefix("::ffff:"), int(port, 16)


def gone(pid: int, seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
