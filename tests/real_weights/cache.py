"""Things that are made once on a machine, kept outside the repository, and found by every later test run."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "FORERUN_TEST_CACHE"


def root() -> Path:
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "forerun-tests")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, filled by `make` if it is not there: whole or not at all, by one process."""
    target = root() / name
    if target.exists():
        return target
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=root(), prefix=f".{name}.") as work:
                made = Path(work) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target
