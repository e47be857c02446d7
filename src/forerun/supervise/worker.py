"""The worker's side: what a process that trains knows of its supervisor."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from forerun import interrupt
from forerun.supervise.channel import VARIABLE, Nobody, SupervisorChannel
from forerun.supervise.limits import STOPPED, Limits
from forerun.supervise.pulse import Pulse
from forerun.supervise.stop import Stop, Stopped

__all__ = ["Stopped", "Worker", "alone", "connect", "unattended"]

JAX_START_SECONDS = 120
SAVE_MARGIN_SECONDS = 0.2  # between giving up a save and the end of the process, for the last words
# jax's own watch ends healthy processes before the culprit is known; the supervisors see more, and sooner.
JAX_HEARTBEAT_SECONDS = 100


@dataclass(frozen=True)
class Worker:
    """`attempt` counts the lives of the job: it never falls, so it can serve as a fencing number."""

    attempt: int
    index: int
    hosts: int
    coordinator: str
    pulse: Pulse = field(repr=False)
    stop: Stop = field(repr=False)
    is_alone: bool = False  # without a supervisor, so Ctrl-C is for this process

    @property
    def first(self) -> bool:
        """The one host that writes for all, and speaks for all."""
        return self.index == 0

    def initialize_jax(self) -> None:
        """Join the other hosts at `coordinator`, a Unix socket: see `tunnel` for how other hosts reach it."""
        if self.hosts == 1:
            return
        import jax

        # It would take SIGTERM for itself, and it knows steps only; `Stop` also knows evaluations and waits.
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
    def leaving(self, told: Callable[[BaseException], int]) -> Iterator[None]:
        """What fails inside ends this process, once it was `told`, if there are other hosts (see `leave`)."""
        try:
            yield
        except BaseException as error:
            if self.hosts == 1:
                raise
            self.leave(told(error))

    @contextmanager
    def saving_at_ctrl_c(self) -> Iterator[None]:
        """At Ctrl-C inside the block, stop after the step under way and save; `interrupt` limits the time.

        A supervised worker does not do this: it stops where all hosts agree, and its supervisor handles Ctrl-C.
        """
        if not self.is_alone:
            yield
            return

        def stop(seconds: float) -> None:
            if self.stop.units == 0:  # no step was begun, so there is nothing to save
                interrupt.end()
            interrupt.announce("Ctrl-C: saving after this step; press it again to stop immediately")
            # A save that is cut off leaves the older checkpoints as they were, so it is always tried.
            self.stop.here(seconds - SAVE_MARGIN_SECONDS, save=True)

        with interrupt.cooperating(stop):
            yield

    def leave(self, code: int) -> NoReturn:
        """Ends this process at once. For a host that failed: at a normal exit jax would have it wait for the others,
        who wait for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def connect(imports: Callable[[], object] = lambda: None) -> Worker | None:
    """To the supervisor that started this process; None if there is none. Once, from the main thread, early.

    A spare does the `imports`, then waits until it is needed.
    """
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return None
    about = json.loads(given)
    channel = SupervisorChannel(int(about["channel"]))
    if "attempt" not in about:
        imports()
        about |= channel.hear() or sys.exit(1)
    stacks = int(about["stacks"])
    os.set_inheritable(stacks, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    stop = Stop(channel, leave=_leave)
    signal.signal(signal.SIGUSR2, stop.interrupt)
    terminated = _sigterm_descriptor()
    channel.say(kind="hello", thread=threading.main_thread().ident, pid=os.getpid())
    welcome = threading.Event()
    threading.Thread(target=_listen, args=(channel, stop, terminated, welcome), name="supervisor", daemon=True).start()
    welcome.wait(60)  # a stop that was announced before we came is known from here on
    return Worker(
        attempt=int(about["attempt"]),
        index=int(about["index"]),
        hosts=int(about["hosts"]),
        coordinator=str(about["coordinator"]),
        pulse=Pulse(channel, stop),
        stop=stop,
    )


def unattended() -> Worker:
    """Neither a supervisor nor a signal: a pulse that nobody hears, and a stop that nobody announces."""
    stop = Stop(Nobody(), leave=_leave)
    return Worker(attempt=0, index=0, hosts=1, coordinator="", pulse=Pulse(Nobody(), stop), stop=stop)


def alone(grace_seconds: float = Limits.grace) -> Worker:
    """For a process without a supervisor: a pulse that nobody hears, and a stop that SIGTERM announces."""
    stop = Stop(Nobody(), leave=_leave)
    signal.signal(signal.SIGUSR2, stop.interrupt)
    terminated = _sigterm_descriptor()
    pulse = Pulse(Nobody(), stop)

    def listen() -> None:
        while signal.SIGTERM not in os.read(terminated, 256):
            pass
        stop.here(grace_seconds)

    threading.Thread(target=listen, name="sigterm", daemon=True).start()
    return Worker(attempt=0, index=0, hosts=1, coordinator="", pulse=pulse, stop=stop, is_alone=True)


def _sigterm_descriptor() -> int:
    """Readable after SIGTERM, at once, also while the main thread is inside a compilation."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if not interrupt.copy_signals_to(writer):
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _listen(channel: SupervisorChannel, stop: Stop, terminated: int, welcome: threading.Event) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(terminated, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if terminated in ready and signal.SIGTERM in os.read(terminated, 256):
            channel.say(kind="sigterm")
        if channel.fileno() not in ready:
            continue
        message = channel.hear()
        if message is None:
            _die_with_supervisor()
            return
        if message["kind"] == "welcome":
            welcome.set()
        elif message["kind"] == "ask":
            stop.ask(message["seconds"])
        elif message["kind"] == "decide":
            stop.decide(message["units"], message["save"], message["seconds"])


def _leave() -> None:
    """From a thread, while the main one is busy with something that nobody will need."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def _die_with_supervisor() -> None:
    """Nobody watches any more, and another attempt may begin elsewhere: end with all children."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
