"""One worker process, as its supervisor controls it. The worker never outlives its supervisor."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from forerun.supervise.console import Console
from forerun.supervise.protocol.channel import MAX_BYTES, VARIABLE, encode_packet
from forerun.supervise.protocol.json_form import decode_from_worker
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    OUT_OF_MEMORY,
    STEP,
    Begin,
    DeviceBytes,
    Fact,
    FromSupervisor,
    FromWorker,
    Phase,
    Saved,
    Sigterm,
    Step,
    Unit,
    Waiting,
    Welcome,
    WorkerExit,
    WorkerHello,
    WorkerUnits,
    WorkerView,
)

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
        self._oom_kills = oom_kills()
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
        self._oom_kills = oom_kills()
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
        if code == -signal.SIGKILL and not self._ended and oom_kills() > self._oom_kills:
            self._tail += f"\n{OUT_OF_MEMORY}\n".encode()
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


RECENT = 200  # step times that the percentile is computed from
FEW = 5  # with fewer step times than this, the percentile means nothing
STOPPED_BY_SIGNAL = "T"  # the state in /proc/PID/stat


class WorkerProgress:
    """The progress of one worker, updated from its messages. `now` is the time of a monotonic clock, in seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = now
        self._stepped: float | None = None
        self._warm = False  # the first step after another phase is unusually slow, so its time is not measured
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.phase, self.step, self.units = "start", 0, 0
        self._before_wait: str | None = None
        self._halted: float | None = None  # when the process was first seen stopped by a signal
        self.save_seconds: float | None = None
        self._device_memory: DeviceBytes | None = None

    def hear(self, message: FromWorker, now: float) -> None:
        """Record a message of the worker. A message about progress restarts the time without progress."""
        match message:
            case Phase():
                self.phase, self._stepped, self._warm = message.name, None, False
            case Waiting():
                self._before_wait, self.phase = self._before_wait or self.phase, f"waiting for {message.what}"
            case Step():
                if self._stepped is not None and self._warm:
                    self._seconds.append(now - self._stepped)
                self._warm = self._stepped is not None
                self.phase, self.step, self._stepped = STEP, message.step, now
            case Saved():
                self.save_seconds = message.seconds
            case DeviceBytes():  # no progress: a thread could send it from a process that hangs
                self._device_memory = message
                return
            case Unit():
                self.phase = self._before_wait or self.phase
            case _:
                return
        if not isinstance(message, Waiting | Saved):
            self._before_wait = None
        self.units, self._heard = message.units, now

    def excuse(self, away_seconds: float, now: float) -> None:
        """Exclude `away_seconds`, in which the supervisor did not run, from the time without progress.

        The worker may have been suspended too, and its messages were not read.
        """
        self._heard = min(now, self._heard + away_seconds)
        if self._halted is not None:
            self._halted = min(now, self._halted + away_seconds)

    def step_seconds(self) -> float:
        """Return the 99th percentile of recent step times in seconds, or 0 if no step was measured."""
        if not self._seconds:
            return 0.0
        return sorted(self._seconds)[math.ceil(0.99 * len(self._seconds)) - 1]

    def limit_seconds(self) -> float:
        """Return how long the worker may report no progress in its current phase."""
        if self.phase != STEP:
            return self._limits.phase_seconds(self.phase)
        if len(self._seconds) < FEW:
            return self._limits.phase_seconds("first steps")
        return self._stall_seconds()

    def _stall_seconds(self) -> float:
        """Return how long a worker that makes steps may report none. See `Limits`."""
        limits = self._limits
        return limits.stall * max(limits.stall_floor, limits.stall_steps * self.step_seconds())

    def view(
        self, now: float, *, state: str, cpu_seconds: float, alive: bool, resident_bytes: int | None = None
    ) -> WorkerView:
        """Return the progress at `now`. `state`, `cpu_seconds`, `alive` and `resident_bytes` describe the process."""

        # A process that a signal stopped makes no progress, even in a phase that has a limit of hours.
        self._halted = (self._halted if self._halted is not None else now) if state == STOPPED_BY_SIGNAL else None
        device = self._device_memory
        return WorkerView(
            phase=self.phase,
            step=self.step,
            units=self.units,
            silent_seconds=now - self._heard,
            limit_seconds=self.limit_seconds(),
            state=state,
            cpu_seconds=cpu_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.step_seconds(),
            alive=alive,
            halted=self._halted is not None and now - self._halted > self._stall_seconds(),
            memory="HBM" if device else "RAM",
            memory_bytes=device.bytes if device else resident_bytes,
            memory_limit_bytes=(device.limit or None) if device else None,
        )


def oom_kills(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of kills so far, or 0 if it is unknown. Version 2 of control groups includes subgroups."""
    return sum(_counted(file) for file in _files(proc, mounted))


def _files(proc: Path, mounted: Path) -> list[Path]:
    """Return the files that contain the counters of this process's control groups."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text("utf-8").splitlines()]
    except OSError:
        return []
    found = []
    for number, controllers, path in lines:
        inside = path.lstrip("/")
        if number == "0" and not controllers:
            found += [mounted / inside / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [mounted / "memory" / inside / "memory.oom_control"]
    return found


def _counted(file: Path) -> int:
    try:
        words = [line.split() for line in file.read_text("utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(parts[1]) for parts in words if len(parts) == 2 and parts[0] == "oom_kill" and parts[1].isdigit())
