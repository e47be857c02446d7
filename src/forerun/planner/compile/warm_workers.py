"""Workers that have jax imported before a request comes: forks of a template process.

`warm_workers()` provides them to all compiles of a command. The template process belongs to the command and ends with
it, or it is shared by the commands of the user and ends after a few idle minutes. If a template fails for any reason,
the compile starts a worker of its own, with the same result.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from forerun.planner.compile import shared_template

MODULE = "forerun.planner.compile.template"


def base_environment() -> dict[str, str]:
    """Return the environment of all compiles, without the part that depends on the request."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program would not be dumped
    }


class LostWorker(Exception):
    """The template process ended, so the state of its worker is unknown."""


class Worker(Protocol):
    """A process that compiles. `subprocess.Popen` is one, too."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...


class ForkedWorker:
    """A worker that a template forked. The template reports its pid and its exit code on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = 0  # until the template has forked
        self.returncode: int | None = None
        self._connection = connection
        self._received = bytearray()
        self._pidfd: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the worker runs or has not been forked yet.

        Raises:
            LostWorker: The template process ended.
        """
        while self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read()
        return self.returncode

    def end(self) -> None:
        """Kill the worker if it still runs, and return when it has ended."""
        try:
            if self.returncode is None and self.pid:
                self._kill()
                while True:  # the template removes the folder of a client that does not wait for the exit code
                    self._read()
                    if self.returncode is not None:
                        break
        except LostWorker:
            pass
        finally:
            self._connection.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 12)
        except OSError:
            data = b""
        if not data:
            raise LostWorker
        self._received += data
        while b"\n" in self._received:
            line, _, rest = self._received.partition(b"\n")
            self._received = bytearray(rest)
            message = json.loads(line)
            self.returncode = message.get("exit", self.returncode)
            if "pid" in message:
                self.pid = int(message["pid"])
                with suppress(OSError):  # it has already ended
                    self._pidfd = os.pidfd_open(self.pid)

    def _kill(self) -> None:
        """Kill the worker's process group and wait until the worker has ended."""
        if self._pidfd is not None:
            if not select.select([self._pidfd], [], [], 0)[0]:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            select.select([self._pidfd], [], [])


class WarmWorkers:
    """Starts workers from one template process, which begins with the first request or with `prepare`."""

    def __init__(self, environment: Mapping[str, str], *, shared: bool) -> None:
        self._environment, self._shared = dict(environment), shared
        self._lock = threading.Lock()
        self._connect: Callable[[], socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def prepare(self) -> None:
        """Start the template process, or find the shared one. It imports its modules in parallel to this process.

        Errors are ignored: compiles then start their own workers.
        """
        with self._lock:
            if self._connect is not None:
                return
            if self._shared:
                with suppress(OSError, subprocess.SubprocessError):
                    self._connect = shared_template.connector(self._environment, self._spawn_shared)
                    return
            with suppress(OSError):
                self._connect = self._private_connector()

    def start(self, request: dict[str, object]) -> ForkedWorker | None:
        """Return a worker for a request, or None if there is no template."""
        self.prepare()
        if self._connect is None:
            return None
        try:
            connection = self._connect()
        except OSError:
            return None
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            connection.close()
            return None
        return ForkedWorker(connection)

    def close(self) -> None:
        """End the template process of this command. A shared one continues."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _private_connector(self) -> Callable[[], socket.socket]:
        control, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(["control", str(theirs.fileno())], theirs, self._environment)
        self._control = control

        def connect() -> socket.socket:
            ours, other = socket.socketpair()
            with other, self._lock:
                socket.send_fds(control, [b"c"], [other.fileno()])
            return ours

        return connect

    def _spawn_shared(self, listener: socket.socket, path: Path) -> None:
        # A process between this one and the template: the template is then no child of a long session, which would
        # have to reap it.
        launcher = "import subprocess, sys; subprocess.Popen(sys.argv[2:], pass_fds=[int(sys.argv[1])], **{options})"
        options = "dict(stdin=subprocess.DEVNULL, start_new_session=True, cwd='/')"
        handle = str(listener.fileno())
        command = [sys.executable, "-I", "-S", "-c", launcher.format(options=options), handle]
        command += [sys.executable, "-P", "-m", MODULE, "listen", handle, str(path)]
        subprocess.run(
            command,
            env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )


def _spawn(arguments: list[str], handle: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, *arguments],
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # no threads before a fork
        pass_fds=[handle.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command, which ends its template
    )


_current: WarmWorkers | None = None


def current() -> WarmWorkers | None:
    """Return the warm workers of the running command, or None."""
    return _current


@contextmanager
def warm_workers(*, shared: bool = False) -> Iterator[WarmWorkers]:
    """Provide warm workers to all compiles inside the block. Inner blocks use those of the outermost one.

    Args:
        shared: Whether to use the template process that all commands of the user share, and to start it if necessary.
    """
    global _current
    if _current is not None:
        yield _current
        return
    _current = WarmWorkers(base_environment(), shared=shared)
    try:
        yield _current
    finally:
        _current.close()
        _current = None
