"""The fork server: a process that has imported jax, and forks a worker for each compile of a command.

A worker is killed as soon as the compiler has dumped its reports, so no worker compiles twice. A fork saves each worker
the imports, which take more than one CPU second. The server creates no topology and opens no backend: libtpu and jax
start threads there, and a process with threads must not fork.

The server belongs to one command. It ends when the command closes its end of the control socket, or is killed. A worker
has its own connection to the command as its stdin, and ends when that connection closes, also without the server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

COMMAND = (sys.executable, "-P", "-m", "forerun.planner.compile.fork_server")
MODULES = (
    "jax.experimental.pallas.ops.tpu.splash_attention",
    "jax.experimental.topologies",
    "optax",
    "forerun.methods.method",
    "forerun.models.model_facts",
    "forerun.planner.compile.worker",
    "forerun.program.build",
    "forerun.program.kernels",
    "forerun.program.recording",
)
REQUEST, NOISE = "request.json", "stderr"  # files in the folder of a worker
LONGEST_PATH_BYTES = 4096
NUMBER_BYTES = 4  # of a message to the command: the worker's pid, later its exit code
FAILED = 70  # exit code of a worker whose own code failed


class ForkedWorker:
    """A worker process. The server reports its pid, and its exit code when it has ended."""

    def __init__(self, connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.pid = 0  # until the server has forked
        self.returncode: int | None = None
        self._connection, self._server = connection, server
        self._pidfd: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the worker runs or has not been forked yet.

        A server that was killed before it forked counts as the worker.
        """
        with suppress(BlockingIOError):
            while self.returncode is None:
                self._receive(socket.MSG_DONTWAIT)
        return self.returncode

    def end(self) -> None:
        """Kill the worker's process group if it runs, and return when the worker has ended."""
        # A worker that is forked later ends on its own, because its connection is closed.
        if self.poll() is None and self._pidfd is not None:
            if not select.select([self._pidfd], [], [], 0)[0]:  # it runs, so the pid is its own
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            while self.returncode is None:
                self._receive()
        self._connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _receive(self, flags: int = 0) -> None:
        message = self._connection.recv(NUMBER_BYTES, flags)
        if not message:  # closed by the server and the worker, without an exit code
            self.returncode = self._server.wait()
        elif self.pid:
            self.returncode = int.from_bytes(message, "big", signed=True)
        else:
            self.pid = int.from_bytes(message, "big", signed=True)
            with suppress(ProcessLookupError):  # it has already ended
                self._pidfd = os.pidfd_open(self.pid)


class ForkServer:
    """The command's side of a fork server, which starts with the first worker or with `start`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the server process. It imports its modules in parallel to this process."""
        with self._lock:
            if self._process is not None:
                return
            self._control, theirs = _socket_pair()
            with theirs:
                self._process = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno())],
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the command, which ends its server
                )

    def fork(self, folder: Path, question: str, environment: Mapping[str, str], plugins: Path | None) -> ForkedWorker:
        """Start a worker.

        Args:
          folder: the folder of its request, its output and its results.
          question: what to compile, in the form of `CompileRequest.to_json`.
          environment: variables that the worker gets in addition to those of this process.
          plugins: the folder of a job's own classes.
        """
        self.start()
        assert self._process is not None
        assert self._control is not None
        request = {"question": question, "environment": environment, "plugins": plugins and str(plugins)}
        (folder / REQUEST).write_text(json.dumps(request), "utf-8")
        (folder / NOISE).touch()
        ours, theirs = _socket_pair()
        with theirs, suppress(OSError):  # a server that has ended closes the connection
            socket.send_fds(self._control, [os.fsencode(folder)], [theirs.fileno()])
        return ForkedWorker(ours, self._process)

    def close(self) -> None:
        """End the server process."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_server: ForkServer | None = None
_blocks = 0


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Provide a fork server to the compiles inside the block. All blocks that are open in this process share one."""
    global _server, _blocks
    with _lock:
        server = _server = _server or ForkServer()
        _blocks += 1
    try:
        yield server
    finally:
        with _lock:
            _blocks -= 1
            is_last = not _blocks
            if is_last:
                _server = None
        if is_last:
            server.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets that keep the borders of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _environment() -> dict[str, str]:
    """Return the environment of the server and its workers."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program would not be dumped
        "OPENBLAS_NUM_THREADS": "1",  # no threads before a fork
    }


def serve(control: socket.socket) -> None:
    """Fork a worker for each request, and report its pid and its exit code, until the command has ended."""
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    connections: dict[int, socket.socket] = {}  # by the pid of the worker
    while True:
        ready, _, _ = select.select([control.fileno(), wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 1 << 12)
            for pid in list(connections):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with connections.pop(pid) as connection:
                        _send(connection, os.waitstatus_to_exitcode(status))
        if control.fileno() in ready:
            folder, descriptors, _, _ = socket.recv_fds(control, LONGEST_PATH_BYTES, 1)
            if not descriptors:  # the command has ended
                return
            connection = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                _become_worker(connection, Path(os.fsdecode(folder)))
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # the worker does the same: its group must exist before it may be killed
            connections[pid] = connection
            _send(connection, pid)


def _send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the command no longer waits for this worker
        connection.send(number.to_bytes(NUMBER_BYTES, "big", signed=True))


def _become_worker(connection: socket.socket, folder: Path) -> NoReturn:
    """Compile a request in this process, a fork of the server, and exit."""
    code = FAILED
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        noise = os.open(folder / NOISE, os.O_WRONLY | os.O_APPEND)
        for descriptor, source in enumerate((connection.fileno(), noise, noise)):
            os.dup2(source, descriptor)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        request: dict[str, Any] = json.loads((folder / REQUEST).read_text("utf-8"))
        os.environ.update(request["environment"])
        from forerun.models.plugin import use_job_folder
        from forerun.planner.compile.worker import answer

        use_job_folder(Path(request["plugins"]) if request["plugins"] else None)
        code = answer(request["question"], folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(handle: int) -> None:
    """Import the modules of a compile and serve. `handle` is the file descriptor of the control socket."""
    with suppress(Exception):  # a worker imports a module again, and reports the error
        for name in MODULES:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a worker then does not copy the server's pages
    serve(socket.socket(fileno=handle))


if __name__ == "__main__":
    main(int(sys.argv[1]))
