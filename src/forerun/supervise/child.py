"""The supervisor's side of one worker: start it, hear it, take its stacks, end it. It never outlives its supervisor."""

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
from dataclasses import dataclass
from typing import Any

from forerun.supervise import memory
from forerun.supervise.channel import MOST_BYTES, VARIABLE, encoded
from forerun.supervise.limits import Limits
from forerun.supervise.progress import Progress, View
from forerun.supervise.voice import Voice

TAIL_BYTES = 1 << 14
STACKS_QUIET_SECONDS = 0.3
# Runs before the worker's own program: it dies with its supervisor from its first moment on (Linux: PR_SET_PDEATHSIG).
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


@dataclass(frozen=True)
class Exit:
    """How a worker ended; `ended` if we did it. `code` is negative for a signal."""

    code: int
    ended: bool
    tail: str

    def spoken(self) -> str:
        if self.code >= 0:
            return f"left with code {self.code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"


class Child:
    """One worker: of one attempt, or a spare that has imported all it needs and waits for its attempt (`begin`).

    `heard` gets the messages that are not about progress.
    """

    def __init__(self, limits: Limits, heard: Callable[[dict[str, Any]], None], voice: Voice) -> None:
        self._heard, self._voice = heard, voice
        self._limits = limits
        self.progress = Progress(limits, time.monotonic())
        self.connected = False
        self.facts: dict[str, str] = {}
        self.exit: Exit | None = None
        self.left = asyncio.Event()
        self._ended = False
        self._main_thread = 0
        self._tail = b""
        self._oom_kills = memory.oom_kills()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker is gone
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, command: Sequence[str], environment: dict[str, str], about: dict[str, Any] | None = None
    ) -> None:
        """As a spare, if nothing is said `about` its attempt."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self._socket = mine
        descriptors = (theirs.fileno(), self._stacks.fileno())
        known = {**(about or {}), "channel": descriptors[0], "stacks": descriptors[1]}
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

    def begin(self, about: dict[str, Any]) -> None:
        """The attempt of a spare."""
        self.progress = Progress(self._limits, time.monotonic())
        self._oom_kills = memory.oom_kills()
        self.send({"kind": "begin", **about})

    @property
    def pid(self) -> int:
        return self._process.pid

    def view(self) -> View:
        state, cpu_seconds = process_state(self.pid)
        alive = self.exit is None
        return self.progress.view(time.monotonic(), state=state, cpu_seconds=cpu_seconds, alive=alive)

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._socket.send(encoded(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def stacks(self) -> str:
        """Of all threads; empty if the process cannot answer (stopped, or not yet connected)."""
        if not self.connected or self.exit is not None:
            return ""
        size = before = os.fstat(self._stacks.fileno()).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        grown = time.monotonic()
        deadline = grown + self._limits.stacks / 2
        text = ""
        while time.monotonic() < deadline:  # it is written line by line, and nothing says that it is whole
            await asyncio.sleep(0.05)
            now = os.fstat(self._stacks.fileno()).st_size
            if now != size:
                size, grown = now, time.monotonic()
                text = os.pread(self._stacks.fileno(), MOST_BYTES, before).decode(errors="replace")
            elif time.monotonic() - grown > STACKS_QUIET_SECONDS and self.main_stack(text):
                break  # the main thread's stack comes last, and a busy machine may pause anywhere before
        return text

    def main_stack(self, stacks: str) -> list[str]:
        """The main thread's frames, innermost first, as `function (file:line)`."""
        return frames_of(stacks, self._main_thread)

    async def end(self) -> None:
        """With its children, at once: a main thread inside a collective would not look at SIGTERM, and a commit is
        whole or not there at any moment."""
        self._ended = self._ended or not self.dead
        self._kill_group()
        await self.left.wait()

    @property
    def dead(self) -> bool:
        """Asked of the kernel: on a busy machine we may not have heard of it yet, and it may be the cause of all."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped
            return True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while packet := await loop.sock_recv(self._socket, MOST_BYTES):
                message = json.loads(packet)
                self.progress.hear(message, time.monotonic())
                if message["kind"] == "hello":
                    self.connected, self._main_thread = True, int(message["thread"])
                    self.send({"kind": "welcome"})
                elif message["kind"] == "fact":
                    self.facts[str(message["name"])] = str(message["value"])
                elif message["kind"] in ("begun", "sigterm"):
                    self._heard(message)

    async def _copy_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 14):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._voice.write(data)

    async def _wait(self) -> None:
        code = await self._process.wait()
        if code == -signal.SIGKILL and not self._ended and memory.oom_kills() > self._oom_kills:
            self._tail += f"\n{memory.MARK}\n".encode()
        self._kill_group()  # what it started ends with it
        await asyncio.wait(self._tasks[:2], timeout=0.5)
        self.exit = Exit(code, self._ended, self._tail.decode(errors="replace"))
        for task in self._tasks[:2]:
            task.cancel()
        self._socket.close()
        self._stacks.close()
        self.left.set()


def process_state(pid: int) -> tuple[str, float]:
    """The state's letter and the CPU seconds used, from /proc; ("?", 0) where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "?", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def frames_of(stacks: str, thread: int) -> list[str]:
    """Of one thread in faulthandler's text, innermost first."""
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
