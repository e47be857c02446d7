"""One worker process, as its supervisor controls it. The worker never outlives its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from forerun.supervise import oom_counter
from forerun.supervise.console import Console
from forerun.supervise.protocol.channel import MAX_BYTES, VARIABLE, encode_packet
from forerun.supervise.protocol.json_form import decode_from_worker
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Begin, Fact, FromSupervisor, Sigterm, Welcome, WorkerHello, WorkerUnits
from forerun.supervise.protocol.worker_progress import WorkerProgress
from forerun.supervise.protocol.worker_state import WorkerExit, WorkerView

TAIL_BYTES = 1 << 14
STACKS_QUIET_SECONDS = 0.3
# Runs before the worker's own program. It makes the kernel kill the worker when its supervisor dies (PR_SET_PDEATHSIG,
# Linux only), and it exits if the supervisor has already died.
_BOUND = """\
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"error: {sys.argv[2]} cannot be started: {error.strerror}", file=sys.stderr)
    sys.exit(2)
"""


class Child:
    """One worker process. A spare is a worker that has done its imports and waits for an attempt (`begin`).

    `heard` receives the messages that concern the leader.
    """

    def __init__(self, limits: Limits, heard: Callable[[WorkerUnits | Sigterm], None], console: Console) -> None:
        self._heard, self._console = heard, console
        self._limits = limits
        self.progress = WorkerProgress(limits, time.monotonic())
        self.connected = False
        self.facts: dict[str, str] = {}
        self.exit: WorkerExit | None = None
        self.left = asyncio.Event()
        self._ended = False
        self._main_thread = 0
        self._tail = b""
        self._oom_kills = oom_counter.oom_kills()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker is gone
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, command: Sequence[str], environment: dict[str, str], begin: Begin | None = None) -> None:
        """Start the worker of an attempt. Without `begin`, start a spare."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self._socket = mine
        descriptors = (theirs.fileno(), self._stacks.fileno())
        known = {**(asdict(begin) if begin else {}), "channel": descriptors[0], "stacks": descriptors[1]}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command),
            env={**environment, VARIABLE: json.dumps(known)},
            pass_fds=descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._copy_stderr(), self._wait())]

    def begin(self, begin: Begin) -> None:
        """Assign an attempt to a spare."""
        self.progress = WorkerProgress(self._limits, time.monotonic())
        self._oom_kills = oom_counter.oom_kills()
        self.send(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def view(self) -> WorkerView:
        """Return the progress and the state of the process at this moment."""
        state, cpu_seconds = process_state(self.pid)
        alive = self.exit is None
        return self.progress.view(
            time.monotonic(),
            state=state,
            cpu_seconds=cpu_seconds,
            alive=alive,
            resident_bytes=resident_bytes(self.pid),
        )

    def send(self, message: FromSupervisor) -> None:
        """Send a message without blocking. An error is ignored: a worker that has exited is noticed elsewhere."""
        with suppress(OSError):
            self._socket.send(encode_packet(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def stacks(self) -> str:
        """Return the stacks of all threads, or "" if the process cannot answer: it is stopped, or not yet connected."""
        if not self.connected or self.exit is not None:
            return ""
        size = before = os.fstat(self._stacks.fileno()).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        grown = time.monotonic()
        deadline = grown + self._limits.stacks / 2
        text = ""
        # faulthandler writes line by line and marks no end. The stack of the main thread comes last. A busy machine may
        # pause anywhere before, so a pause is the end only after that stack has appeared.
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            now = os.fstat(self._stacks.fileno()).st_size
            if now != size:
                size, grown = now, time.monotonic()
                text = os.pread(self._stacks.fileno(), MAX_BYTES, before).decode(errors="replace")
            elif time.monotonic() - grown > STACKS_QUIET_SECONDS and self.main_stack(text):
                break
        return text

    def main_stack(self, stacks: str) -> list[str]:
        """Return the frames of the main thread, innermost first, as `function (file:line)`."""
        return frames_of(stacks, self._main_thread)

    async def end(self) -> None:
        """Kill the worker and its children with SIGKILL.

        A main thread inside a collective would not handle SIGTERM. Commits of checkpoints are atomic, so SIGKILL leaves
        them valid.
        """
        self._ended = self._ended or not self.dead
        self._kill_group()
        await self.left.wait()

    @property
    def dead(self) -> bool:
        """Whether the process has exited, according to the kernel. asyncio notices an exit late on a busy machine."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped
            return True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        """Receive messages until the worker closes its end."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while packet := await loop.sock_recv(self._socket, MAX_BYTES):
                message = decode_from_worker(json.loads(packet))
                self.progress.hear(message, time.monotonic())
                match message:
                    case WorkerHello(thread):
                        self.connected, self._main_thread = True, thread
                        self.send(Welcome())
                    case Fact(name, value):
                        self.facts[name] = value
                    case WorkerUnits() | Sigterm():
                        self._heard(message)

    async def _copy_stderr(self) -> None:
        """Print the stderr of the worker, and keep its last bytes for the report of an exit."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 14):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._console.write(data)

    async def _wait(self) -> None:
        """Wait for the exit of the worker, record it, and release what belongs to the worker."""
        code = await self._process.wait()
        if code == -signal.SIGKILL and not self._ended and oom_counter.oom_kills() > self._oom_kills:
            self._tail += f"\n{oom_counter.MARK}\n".encode()
        self._kill_group()  # child processes of the worker end with it
        await asyncio.wait(self._tasks[:2], timeout=0.5)
        self.exit = WorkerExit(code, self._ended, self._tail.decode(errors="replace"))
        for task in self._tasks[:2]:
            task.cancel()
        self._socket.close()
        self._stacks.close()
        self.left.set()


def process_state(pid: int) -> tuple[str, float]:
    """Return the state (a letter) and the CPU seconds of a process from /proc, or ("?", 0) if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "?", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process from /proc, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def frames_of(stacks: str, thread: int) -> list[str]:
    """Return the frames of one thread from the output of faulthandler, innermost first."""
    found: list[str] = []
    inside = False
    for line in stacks.splitlines():
        if "hread 0x" in line:
            inside = int(line.partition("0x")[2].split()[0], 16) == thread
        elif inside and line.startswith("  File "):
            file, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            found.append(f"{function} ({file}:{number})")
    return found
