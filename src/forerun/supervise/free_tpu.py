"""The check that the TPU of this host is free. libtpu itself fails late and does not name the process that uses it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from forerun.errors import UserError
from forerun.hardware.devices import Absence, ThisMachine
from forerun.hardware.tpu_lock import LOCK_FILE, read_lock
from forerun.reporter import Reporter


class TpuMachine(Protocol):
    """The properties of this machine that `require_free_tpu_for` reads."""

    def absence(self, platform: str) -> Absence | None: ...
    def attached_tpu(self) -> str | None: ...


def require_free_tpu(
    reporter: Reporter,
    path: Path = LOCK_FILE,
    proc: Path = Path("/proc"),
    attached: Callable[[], str | None] | None = None,
) -> None:
    """Remove the TPU lock file if a dead process of this user left it.

    Args:
        reporter: Receives a message if the file is removed, or if it belongs to another user.
        path: The lock file of libtpu.
        proc: The folder of the process file system.
        attached: Returns the TPU of this machine, or None. Without one, nothing is checked.

    Raises:
        UserError: A live process holds the TPU.
    """
    if (attached or ThisMachine().attached_tpu)() is None:
        return
    lock = read_lock(path, proc)
    if lock is None:
        return
    if any(holder.pid == os.getpid() for holder in lock.holders):
        return  # an earlier run of this process, such as the stage before, has opened the TPU
    if lock.holders:
        holder = lock.holders[0]
        raise UserError(
            "E-HOSTS-005",
            f"the TPU is in use by process {holder.pid}",
            why=f"{holder.command}\nholds {lock.path}",
            fix=f"end it (kill {holder.pid}), or wait for it",
        )
    if not lock.mine:
        reporter.info(
            f"{lock.path} belongs to another user, and no holder is visible; if the TPU does not open, remove it"
        )
        return
    if _removed(path):
        reporter.info(f"removed {lock.path}: the process that made it is dead")


def require_free_tpu_for(
    device: str | tuple[str, ...], reporter: Reporter, path: Path = LOCK_FILE, machine: TpuMachine | None = None
) -> None:
    """Call `require_free_tpu` for a process without a supervisor, if the TPU is the first device of the job.

    Call this before jax opens its devices. If the job lists another device too, a live holder is reported but not
    raised, because `choose` falls back to that device.
    """
    if os.environ.get("TPU_VISIBLE_CHIPS"):
        return  # this process uses only some chips, and other processes may use the rest
    here = machine or ThisMachine()
    order = ("tpu",) if device == "auto" else (device,) if isinstance(device, str) else device
    if order[0] != "tpu" or here.absence("tpu") is not None:
        return
    try:
        require_free_tpu(reporter, path, attached=here.attached_tpu)
    except UserError as error:
        if len(order) == 1:
            raise
        reporter.info(error.what)


def _removed(path: Path) -> bool:
    """Remove the lock file and return True, or return False if another process has locked it meanwhile.

    Only the holder of the lock may remove the file, so this process takes the lock first.
    """
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
