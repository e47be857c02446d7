"""Whether the TPU of this host is free for a worker: libtpu's own answer comes late and does not name the holder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun.doctor.lock import LOCK_FILE, read_lock
from forerun.errors import UserError
from forerun.hardware.devices import ThisMachine


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
    path.unlink(missing_ok=True)
    say(f"removed {lock.path}: the process that made it is dead")
