"""The template process: it imports everything that a compile needs, and forks a worker for each request.

A worker is killed as soon as the compiler has dumped its reports, so no worker compiles twice. A fork of a process that
has imported jax saves these imports. The template creates no topology and opens no backend: libtpu and jax start their
threads there, and a process with threads must not fork.

Each request comes on its own connection, as one line of JSON. The template answers with the worker's pid, and with its
exit code when it has ended. If the client closes its side, the template kills the worker and removes its folder. A
worker holds the connection as its stdin, so it also ends if the template and the client are killed.

Connections come from a command (`control`: one end of a socket pair, over which file descriptors are sent) or from all
commands of the user (`listen`: a socket in a private folder). The first template ends with its command, the second one
when no request has come for IDLE_SECONDS.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

IDLE_SECONDS = 300.0
MAX_REQUEST_BYTES = 16 << 20
NOISE = "stderr"
FOLDER_PREFIX = "forerun-plan-"
MODULES = (
    "jax.experimental.pallas.ops.tpu.splash_attention",
    "jax.experimental.topologies",
    "optax",
    "forerun.methods.method",
    "forerun.models.registry",
    "forerun.planner.compile.worker",
    "forerun.program.build",
    "forerun.program.kernels",
    "forerun.program.recording",
)
_FAILED = 70


@dataclass
class _Connection:
    """A client, and the worker of its request once it has been forked."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    pid: int | None = None
    folder: Path | None = None


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    return int(_credentials(connection)[1])


def peer_pid(connection: socket.socket) -> int:
    """Return the process that listens at, or connected to, the other end of a Unix socket."""
    return int(_credentials(connection)[0])


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    form = "3i"  # struct ucred: pid, uid, gid
    return struct.unpack(form, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form)))


def load_modules() -> None:
    """Import the modules of a compile, and nothing that starts a thread."""
    for name in MODULES:
        importlib.import_module(name)


class Template:
    """The loop of a template process: accepts connections, forks workers, and reports how they ended."""

    def __init__(self, source: socket.socket, *, listens: bool, idle_seconds: float = IDLE_SECONDS) -> None:
        self._source, self._listens, self._idle_seconds = source, listens, idle_seconds
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._is_open = True
        self._last_use = time.monotonic()

    def serve(self) -> None:
        """Serve until the source is closed, or, if it is a listening socket, until no request comes."""
        wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._selector.register(self._source, selectors.EVENT_READ)
        while self._is_open or self._connections:
            for key, _ in self._selector.select(self._wait_seconds()):
                if key.fileobj is self._source:
                    self._accept()
                elif key.fd == wakeup:
                    with suppress(BlockingIOError):
                        os.read(wakeup, 1 << 12)
                elif (connection := self._connections.get(key.fd)) is not None:
                    self._receive(connection)
            self._reap()
            if self._listens and not self._connections and self._wait_seconds() == 0:
                return

    def _wait_seconds(self) -> float | None:
        if not self._listens or self._connections:
            return None
        return max(0.0, self._last_use + self._idle_seconds - time.monotonic())

    def _accept(self) -> None:
        """Add a connection of the same user, or note that no more will come."""
        if self._listens:
            connection, _ = self._source.accept()
            if peer_uid(connection) != os.getuid():
                connection.close()
                return
        else:
            _, handles, _, _ = socket.recv_fds(self._source, 1, 1)
            if not handles:
                self._is_open = False
                self._selector.unregister(self._source)
                return
            connection = socket.socket(fileno=handles[0])
        connection.setblocking(False)
        self._connections[connection.fileno()] = _Connection(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: _Connection) -> None:
        """Read from a client: its request, or the end of its interest in the worker."""
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.pid is not None:
            if not data:
                with suppress(ProcessLookupError):
                    os.killpg(connection.pid, signal.SIGKILL)
                self._selector.unregister(connection.socket)  # _reap answers and closes it
            return
        connection.received += data
        line, end, _ = connection.received.partition(b"\n")
        if end:
            self._fork(connection, bytes(line))
        elif not data or len(connection.received) > MAX_REQUEST_BYTES:
            self._close(connection)

    def _fork(self, connection: _Connection, line: bytes) -> None:
        try:
            request = json.loads(line)
            folder = Path(request["folder"])
        except (ValueError, KeyError, TypeError):
            self._close(connection)
            return
        self._last_use = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, request)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # the child does the same: its group must exist before it may be killed
        connection.pid, connection.folder = pid, folder
        _send(connection.socket, {"pid": pid})

    def _become_worker(self, connection: _Connection, request: dict[str, Any]) -> NoReturn:
        code = _FAILED
        try:
            with suppress(PermissionError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            noise = os.open(Path(request["folder"]) / NOISE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            connection.socket.setblocking(True)
            os.dup2(connection.socket.fileno(), 0)
            os.dup2(noise, 1)
            os.dup2(noise, 2)
            os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["directory"])
            from forerun.models.plugin import use_job_folder
            from forerun.planner.compile.worker import answer

            use_job_folder(Path(request["plugins"]) if request["plugins"] else None)
            code = answer(request["question"], Path(request["folder"]))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report the workers that have ended, and remove the folders of clients that no longer exist."""
        for connection in list(self._connections.values()):
            if connection.pid is None:
                continue
            pid, status = os.waitpid(connection.pid, os.WNOHANG)
            if pid == 0:
                continue
            is_heard = _send(connection.socket, {"exit": os.waitstatus_to_exitcode(status)})
            if not is_heard and connection.folder is not None and connection.folder.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(connection.folder, ignore_errors=True)
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        with suppress(KeyError):
            self._selector.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        self._last_use = time.monotonic()


def _send(connection: socket.socket, message: dict[str, int]) -> bool:
    """Send a line and return whether the client may still read it."""
    try:
        connection.send(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def main(mode: str, handle: int, path: str = "", idle_seconds: float = IDLE_SECONDS) -> int:
    """Import the modules and serve. `mode` is `control` or `listen`, `path` the file of a listening socket."""
    source = socket.socket(fileno=handle)
    own_file = os.stat(path).st_ino if path else None
    if path:
        source.listen()  # again in this process, so that clients see its pid
    try:
        load_modules()
        gc.collect()
        gc.freeze()  # the collector of a worker then does not copy the template's pages
        Template(source, listens=mode == "listen", idle_seconds=idle_seconds).serve()
    finally:
        with suppress(OSError):
            if path and os.stat(path).st_ino == own_file:  # not that of a later template
                os.unlink(path)
    return 0


if __name__ == "__main__":
    mode, handle, path, seconds = [*sys.argv[1:], *("", str(IDLE_SECONDS))[len(sys.argv) - 3 :]]
    sys.exit(main(mode, int(handle), path, float(seconds)))
