"""Whether the TPU of this host is free for a worker: libtpu's own answer comes late and does not name the holder."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from forerun.doctor.lock import LOCK_FILE, read_lock
from forerun.errors import UserError
from forerun.hardware.devices import Absence, ThisMachine


class Machine(Protocol):
    """What is asked of this machine."""

    def absence(self, platform: str) -> Absence | None: ...
    def attached_tpu(self) -> str | None: ...


def free_chip(
    say: Callable[[str], None],
    path: Path = LOCK_FILE,
    proc: Path = Path("/proc"),
    attached: Callable[[], str | None] | None = None,
) -> None:
    """Removes a lock that a dead process of this user left; a live holder is named in a UserError."""
    if (attached or ThisMachine().attached_tpu)() is None:
        return
    lock = read_lock(path, proc)
    if lock is None:
        return
    if lock.holders:
        holder = lock.holders[0]
        raise UserError(
            f"the TPU is in use by process {holder.pid}",
            why=f"{holder.command}\nholds {lock.path}",
            fix=f"end it (kill {holder.pid}), or wait for it",
        )
    if not lock.mine:
        say(f"{lock.path} belongs to another user and no holder can be seen; if the TPU does not open, remove it")
        return
    if _removed(path):
        say(f"removed {lock.path}: the process that made it is dead")


def free_chip_for(
    device: str | tuple[str, ...], say: Callable[[str], None], path: Path = LOCK_FILE, machine: Machine | None = None
) -> None:
    """For a process without a supervisor, before it asks for its devices: as `free_chip`, if the job wants the TPU
    first. Where it lists another device too, a live holder is no mistake: `choose` falls back and says so."""
    here = machine or ThisMachine()
    order = ("tpu",) if device == "auto" else (device,) if isinstance(device, str) else device
    if order[0] != "tpu" or here.absence("tpu") is not None:
        return
    try:
        free_chip(say, path, attached=here.attached_tpu)
    except UserError as error:
        if len(order) == 1:
            raise
        say(error.what)


def _removed(path: Path) -> bool:
    """Only if no process has locked it since it was looked at: whoever removes a lock must hold it."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
