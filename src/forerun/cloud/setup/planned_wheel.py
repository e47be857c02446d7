"""The wheel that planned a run, kept for its later attempts: the user may change the source of forerun meanwhile."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from forerun.cloud.record.entries import CloudRun
from forerun.cloud.setup.wheel import Wheel, build_wheel
from forerun.errors import UserError
from forerun.files import atomic_write

WHEEL = "wheel"  # the key of `CloudRun.versions` with the SHA-256
KEPT = 10  # wheels of the newest plans


def wheel_folder() -> Path:
    """Return the folder with the wheels of this user's runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "wheels"


def keep_wheel() -> str:
    """Store the wheel of the running forerun, and return its SHA-256 for `CloudRun.versions`."""
    wheel = build_wheel()
    file = wheel_folder() / wheel.sha256 / wheel.name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, wheel.content)
        kept = sorted(wheel_folder().glob("*/*.whl"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in kept[KEPT:]:
            old.unlink(missing_ok=True)
            old.parent.rmdir()
    return wheel.sha256


def planned_wheel(run: CloudRun) -> Wheel:
    """Return the wheel of the forerun that planned a run; the running one if the record does not name it.

    Raises:
      UserError: this machine does not have it.
    """
    wanted = run.versions.get(WHEEL)
    for file in (wheel_folder() / wanted).glob("*.whl") if wanted else ():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() == wanted:
            return Wheel(file.name, content)
    wheel = build_wheel()
    if wanted is not None and wheel.sha256 != wanted:
        raise UserError(
            "E-CLOUD-049",
            f"this is not the forerun that planned the run {run.name}",
            why=f"the run was planned with the wheel {wanted[:12]}, and this machine has {wheel.sha256[:12]}",
            fix="start the run's own command again: it plans with this version, and resumes from the checkpoints",
        )
    return wheel
