"""The processes of a host: the first process, the real agent, and a trainer (see `process_hosts.py`).

This program imports forerun once. It then reads one JSON line for each host and forks its first process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
SYSTEMCTL = """#!/bin/sh
if [ "$1" = show ]; then cat {root}/unit; fi
if [ "$1" = stop ]; then : > {root}/stop; fi
"""
EXPORT = """#!/bin/sh
until mkdir -p "$4" && cp {folder}/trained "$4/model.txt"; do sleep 0.1; done
"""
RUNNING = "ActiveState=active\nExecMainCode=0\nExecMainStatus=0\n"
RESTART_SECONDS = 5.0
SAVE_SECONDS = 2.0


def scale_waits(speed: float) -> None:
    """Shorten the waits of forerun's REST client: the fake's clock is faster than this machine's."""
    from forerun.cloud.google import clock, rest

    names = {
        clock: ("FRESH_SECONDS",),
        rest: (
            *("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"),
            *("FIRST_POLL_SECONDS", "LONGEST_POLL_SECONDS", "LONGEST_WAIT_SECONDS"),
        ),
    }
    for module, constants in names.items():
        for name in constants:
            setattr(module, name, getattr(module, name) / speed)


def state_after(step: int) -> str:
    """Return the state of an uninterrupted training: each step depends on all steps before it."""
    state = "begin"
    for one in range(1, step + 1):
        state = next_state(state, one)
    return state


def next_state(state: str, step: int) -> str:
    return hashlib.sha256(f"{state}{step}".encode()).hexdigest()


def newest_checkpoint(folder: Path) -> tuple[int, str]:
    names = sorted(name for name in os.listdir(folder / "checkpoints") if name[0] != ".")
    if not names:
        return 0, "begin"
    values = json.loads((folder / "checkpoints" / names[-1]).read_text())
    return int(values["step"]), str(values["state"])


def patiently(call: Callable[[], T]) -> T:
    """Repeat a call until the bucket answers, as a training does."""
    while True:
        try:
            return call()
        except OSError:
            time.sleep(0.05)


class Trainer:
    """A training of many steps. Host 0 saves checkpoints and the result; SIGTERM saves one and exits with 75."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.settings, self.host = wanted["trainer"], wanted["host"]
        self.root, self.speed = Path(wanted["root"]), float(wanted["speed"])
        self.folder = Path(self.settings["folder"])
        self.stopping = False

    def run(self) -> NoReturn:
        signal.signal(signal.SIGTERM, self._stop)
        step, state = patiently(lambda: newest_checkpoint(self.folder))
        self._tell(f"resume at step {step}")
        while step < self.settings["total_steps"]:
            time.sleep(self.settings["step_seconds"] / self.speed)
            if self.stopping:
                self._save(step, state)
                os._exit(75)
            if self.host > 0:
                # The other hosts take part in each step of host 0. They end with it.
                step = self.settings["total_steps"] if (self.folder / "trained").exists() else 0
                continue
            step += 1
            state = next_state(state, step)
            if step % self.settings["save_every"] == 0:
                self._save(step, state)
            self._progress(step)
        if self.host == 0:
            self._save(step, state)
            patiently(lambda: write(self.folder / "trained", state))
        os._exit(0)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _save(self, step: int, state: str) -> None:
        if self.host > 0:
            return
        time.sleep(SAVE_SECONDS / self.speed)
        name = f"{step:06}.json"
        patiently(lambda: write(self.folder / "checkpoints" / name, json.dumps({"step": step, "state": state})))
        with (self.folder.parent / "saved.txt").open("a") as saved:
            saved.write(f"{name} {state}\n")

    def _progress(self, step: int) -> None:
        hosts = [{"index": 0, "step": step, "save_seconds": SAVE_SECONDS}]
        write(self.root / "var/lib/forerun/job/runs/run/hosts.json", json.dumps({"hosts": hosts}))

    def _tell(self, text: str) -> None:
        with (self.root / "var/log/forerun/train.log").open("a") as log:
            log.write(f"{text}\n")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(file)


class FirstProcess:
    """Stands for systemd and the startup script: waits for the job, then runs and restarts the two services."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted, self.root, self.speed = wanted, Path(wanted["root"]), float(wanted["speed"])
        self.agent = self.trainer = 0
        self.agent_at = self.trainer_at = 0.0
        self.trainer_ended = self.agent_ended = False

    def run(self) -> NoReturn:
        os.setsid()
        os.environ.update(self.wanted["environment"])
        log = os.open(self.root / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (0, 1, 2):
            os.dup2(log if stream else os.open(os.devnull, os.O_RDONLY), stream)
        for name in ("usr/bin", "opt/forerun/venv/bin", "var/lib/forerun/job/runs/run", "var/log/forerun", "inbox"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self._program("usr/bin/systemctl", SYSTEMCTL.format(root=self.root))
        self._program("opt/forerun/venv/bin/forerun", EXPORT.format(folder=self.wanted["trainer"]["folder"]))
        write(self.root / "unit", "ActiveState=inactive\nExecMainCode=0\nExecMainStatus=0\n")
        write(self.root / "var/lib/forerun/state", "waiting")
        write(self.root / "pid", str(os.getpid()))
        while not (self.root / "inbox/agent.json").exists():
            time.sleep(0.05)
        write(self.root / "var/lib/forerun/agent.json", (self.root / "inbox/agent.json").read_text())
        write(self.root / "var/lib/forerun/state", "started")
        write(self.root / "unit", RUNNING)
        while True:
            self._turn()
            time.sleep(0.02)

    def _program(self, name: str, text: str) -> None:
        write(self.root / name, text)
        (self.root / name).chmod(0o755)

    def _turn(self) -> None:
        now = time.monotonic()
        if not self.agent and not self.agent_ended and now >= self.agent_at:
            self.agent = self._fork("agent", self._agent)
        if not self.trainer and not self.trainer_ended and now >= self.trainer_at:
            self.trainer = self._fork("trainer", lambda: Trainer(self.wanted).run())
        if self.trainer and ((self.root / "stop").exists() or (self.root / "notice").exists()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.trainer, signal.SIGTERM)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, status, now)

    def _ended(self, pid: int, status: int, now: float) -> None:
        code = os.waitstatus_to_exitcode(status)
        if pid == self.agent:
            # As the unit says: Restart=on-failure.
            self.agent, self.agent_at, self.agent_ended = 0, now + RESTART_SECONDS / self.speed, code == 0
        elif pid == self.trainer:
            stopped = (self.root / "stop").exists() or (self.root / "notice").exists()
            # Restart=on-abnormal: only a signal restarts it.
            self.trainer, self.trainer_at = 0, now + RESTART_SECONDS / self.speed
            self.trainer_ended = code >= 0 or stopped
            if self.trainer_ended:
                state = "inactive" if code == 0 else "failed"
                kind, number = (1, code) if code >= 0 else (2, -code)
                write(self.root / "unit", f"ActiveState={state}\nExecMainCode={kind}\nExecMainStatus={number}\n")

    def _agent(self) -> NoReturn:
        from forerun.cloud.host.__main__ import main

        log = os.open(self.root / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        settings = self.root / "var/lib/forerun/agent.json"
        code = 1
        try:
            code = main([str(settings), "--root", str(self.root), "--speed", str(self.speed)])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _fork(self, name: str, work: Any) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(70)
        write(self.root / f"{name}.pid", str(pid))
        return pid


def main() -> None:
    # Imported here, so that each host has it without the time of an import.
    import google.auth.transport.requests  # noqa: F401

    import forerun.cloud.compute.compute_provider
    import forerun.cloud.host.start
    import forerun.cloud.providers  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    scaled = False
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        if not scaled:
            scale_waits(float(wanted["speed"]))
            scaled = True
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                FirstProcess(wanted).run()
            finally:
                os._exit(70)


if __name__ == "__main__":
    main()
