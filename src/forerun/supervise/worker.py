"""The worker: the training process of one host, and its connection to its supervisor."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from forerun import interrupt
from forerun.exit_codes import OUR_BUG, STOPPED
from forerun.supervise.protocol.channel import VARIABLE, Channel, NullChannel, SupervisorChannel
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    AskUnits,
    Begin,
    DeviceBytes,
    Fact,
    Phase,
    Saved,
    Sigterm,
    Step,
    StopAfter,
    Waiting,
    Welcome,
    WorkerHello,
)
from forerun.supervise.worker_stop import Stop, Stopped

__all__ = ["Stopped", "Worker", "alone", "connect", "silent_worker"]

JAX_START_SECONDS = 120
MEMORY_SECONDS = 2.0  # at least, between two reports of memory
SAVE_MARGIN_SECONDS = 0.2  # between the deadline of a save and the end of the process, for the last messages
# A long limit, because jax's own heartbeat would end healthy processes before the leader knows which host failed. The
# supervisors detect more failures, and earlier.
JAX_HEARTBEAT_SECONDS = 100


@dataclass(frozen=True)
class Worker:
    """The worker of one host. `attempt` never decreases between restarts, so it can serve as a fencing number.

    `index` is its number among the `hosts` that take part in the attempt. `slices` is the number of slices that they
    form, or None if the run does not count slices.
    """

    pulse: ProgressReporter = field(repr=False)
    stop: Stop = field(repr=False)
    attempt: int = 0
    index: int = 0
    hosts: int = 1
    coordinator: str = ""
    slices: int | None = None
    is_alone: bool = False  # without a supervisor, so this process handles Ctrl-C itself
    _starts: list[float] = field(default_factory=list, repr=False)  # Unix time of the start, until a run takes it

    @property
    def first(self) -> bool:
        """Whether this is host 0, which writes files and prints messages for all hosts."""
        return self.index == 0

    def take_start_seconds(self) -> float:
        """Return the Unix time at which the work on a run began.

        For the first run of this process, it is the start of the process, so that imports count. For a spare, it is the
        start of its attempt. A later run of the process (a stage) begins at this call.
        """
        return self._starts.pop() if self._starts else time.time()

    def initialize_jax(self) -> None:
        """Connect jax to the other hosts through `coordinator`, a Unix socket. `tunnel` explains how this works."""
        if self.hosts == 1:
            return
        import jax

        # jax's preemption service would handle SIGTERM itself, and it stops only between steps. `Stop` also stops
        # evaluations and waits.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self.coordinator,
            self.hosts,
            self.index,
            coordinator_bind_address=self.coordinator,
            cluster_detection_method="deactivate",
            initialization_timeout=JAX_START_SECONDS,
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )

    @contextmanager
    def exit_on_failure(self, told: Callable[[BaseException], int]) -> Iterator[None]:
        """Exit this process if the block fails and there are other hosts (see `leave`).

        `told` reports the error to the user and returns the exit code. On one host, the error is raised.
        """
        try:
            yield
        except BaseException as error:
            if self.hosts == 1:
                raise
            self.leave(told(error))

    @contextmanager
    def saving_at_ctrl_c(self) -> Iterator[None]:
        """Stop after the current step and save if Ctrl-C is pressed inside the block. `interrupt` limits the time.

        For a supervised worker this does nothing: its supervisor handles Ctrl-C, and all hosts agree on where to stop.
        """
        if not self.is_alone:
            yield
            return

        def stop(seconds: float) -> None:
            if self.stop.units == 0:  # no step was begun, so there is nothing to save
                interrupt.end()
            interrupt.announce("Ctrl-C: saving after this step; press it again to stop immediately")
            # An interrupted save does not damage older checkpoints, so a save is always tried.
            self.stop.here(seconds - SAVE_MARGIN_SECONDS, save=True)

        with interrupt.cooperating(stop):
            yield

    def leave(self, code: int) -> NoReturn:
        """Exit this process immediately, without Python's cleanup.

        A host that failed must exit like this. At a normal exit, jax would wait for the other hosts, which wait for
        this one.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def connect(imports: Callable[[], object] = lambda: None) -> Worker | None:
    """Connect to the supervisor that started this process.

    Call this once, early, from the main thread. A spare waits here until it gets an attempt.

    Args:
        imports: Called by a spare before it waits, to import slow modules.

    Returns:
        The worker, or None if no supervisor started this process.
    """
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return None
    about = json.loads(given)
    channel = SupervisorChannel(int(about["channel"]))
    start = process_start_seconds()
    if "attempt" not in about:
        imports()
        begin = channel.hear()
        if not isinstance(begin, Begin):
            sys.exit(OUR_BUG)
        about |= asdict(begin)
        start = time.time()
    for name, value in about.get("variables", {}).items():  # before jax opens the devices
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    stacks = int(about["stacks"])
    os.set_inheritable(stacks, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    stop = Stop(channel, leave=_leave)
    signal.signal(signal.SIGUSR2, stop.interrupt)
    terminated = _sigterm_descriptor()
    channel.say(WorkerHello(threading.main_thread().ident or 0, os.getpid()))
    welcome = threading.Event()
    threading.Thread(target=_listen, args=(channel, stop, terminated, welcome), name="supervisor", daemon=True).start()
    welcome.wait(60)  # from here on, a stop that was announced before the connection is known
    return Worker(
        attempt=int(about["attempt"]),
        index=int(about["index"]),
        hosts=int(about["hosts"]),
        coordinator=str(about["coordinator"]),
        pulse=ProgressReporter(channel, stop),
        stop=stop,
        slices=about.get("slices"),
        _starts=[start],
    )


def silent_worker() -> Worker:
    """Return a worker without a supervisor and without signal handlers.

    Its reports are discarded, and no stop is announced to it.
    """
    stop = Stop(NullChannel(), leave=_leave)
    return Worker(ProgressReporter(NullChannel(), stop), stop)


def alone(grace_seconds: float = Limits.grace) -> Worker:
    """Return a worker without a supervisor. Its reports are discarded, and SIGTERM announces a stop."""
    stop = Stop(NullChannel(), leave=_leave)
    signal.signal(signal.SIGUSR2, stop.interrupt)
    terminated = _sigterm_descriptor()
    pulse = ProgressReporter(NullChannel(), stop)

    def listen() -> None:
        while signal.SIGTERM not in os.read(terminated, 256):
            pass
        stop.here(grace_seconds)

    threading.Thread(target=listen, name="sigterm", daemon=True).start()
    return Worker(pulse, stop, is_alone=True, _starts=[process_start_seconds()])


def process_start_seconds() -> float:
    """Return the Unix time at which this process started, or the current time where Linux's /proc is missing."""
    try:
        # The second field is the name of the program in parentheses, which can contain spaces.
        fields = Path("/proc/self/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - max(0.0, age)


def _sigterm_descriptor() -> int:
    """Return a descriptor that becomes readable immediately after SIGTERM.

    A Python handler would wait until the main thread returns from a compilation.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if not interrupt.copy_signals_to(writer):
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _listen(channel: SupervisorChannel, stop: Stop, terminated: int, welcome: threading.Event) -> None:
    """Handle messages of the supervisor and SIGTERM, in a separate thread."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(terminated, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if terminated in ready and signal.SIGTERM in os.read(terminated, 256):
            channel.say(Sigterm())
        if channel.fileno() not in ready:
            continue
        message = channel.hear()
        if message is None:
            _die_with_supervisor()
            return
        match message:
            case Welcome():
                welcome.set()
            case AskUnits():
                stop.ask(message.seconds)
            case StopAfter():
                stop.decide(message.units, message.save, message.seconds, ends_job=message.ends_job)


def _leave() -> None:
    """Exit from a background thread while the main thread is still compiling."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def _die_with_supervisor() -> None:
    """Kill this process and its children. Without a supervisor, they could run beside a later attempt."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(OUR_BUG)


class ProgressReporter:
    """A worker's reports of progress to its supervisor. Unlike a heartbeat, they stop when the process hangs.

    All methods are thread-safe, and all except `fact` never wait.
    `limits.PHASE_SECONDS` defines how long each phase may last.
    """

    def __init__(self, channel: Channel, stop: Stop) -> None:
        self._channel, self._stop = channel, stop
        self._memory: Callable[[], tuple[int, int | None] | None] = lambda: None
        self._memory_due = 0.0

    def measure_memory(self, read: Callable[[], tuple[int, int | None] | None]) -> None:
        """Report the memory of devices with steps, at most every `MEMORY_SECONDS`.

        `read` returns the bytes in use and the limit of the fullest device, or None if they are unknown.
        """
        self._memory = read

    def phase(self, name: str) -> None:
        """Report the start of a phase: `data`, `compile`, `restore`, `save`, `evaluate`, `finish` or another name."""
        self._channel.tell(Phase(name, self._stop.units))

    def step(self, number: int) -> None:
        """Report that step `number` is done. Its metrics have arrived, so every host took part in it."""
        self._channel.tell(Step(number, self._stop.units))
        if (now := time.monotonic()) >= self._memory_due:
            self._memory_due = now + MEMORY_SECONDS
            if (memory := self._memory()) is not None:
                self._channel.tell(DeviceBytes(memory[0], memory[1] or 0))

    def saved(self, seconds: float) -> None:
        """Report the time of a save from its start to its commit. It is the estimate for a save before a stop."""
        self._stop.save_seconds = seconds
        self._channel.tell(Saved(seconds, self._stop.units))

    def fact(self, name: str, value: str) -> None:
        """Report a value that must be equal on all hosts, such as `data digest`. A difference ends the job."""
        self._channel.say(Fact(name, value))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report that this host waits inside the block for something local, such as `data`.

        The other hosts wait for this one. If all hosts agree to stop here, `Stopped` is raised inside the block. Main
        thread only.
        """
        self._channel.tell(Waiting(what, self._stop.units))
        with self._stop.interrupting():
            yield
