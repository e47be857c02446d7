"""The inputs of the checks as data, so that a test can describe any machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from forerun.doctor.child_probe import DeviceProbe, failure_of_gpu_compiler, probe_devices
from forerun.hardware.devices import ThisMachine
from forerun.hardware.tpu_hosts import attribute
from forerun.hardware.tpu_lock import Lock, read_lock
from forerun.planner.compile.installed_compilers import PLUGINS

Status = Literal["ok", "warn", "FAIL"]
PACKAGES = (
    "forerun",
    "jax",
    "jaxlib",
    "libtpu",
    "libtpu-nightly",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "torch-xla",
    *(name for pair in PLUGINS for name in pair),
)


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix` is the command or edit that helps; empty if nothing is wrong."""

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """The inputs of the checks. `sight` and `unwritable` are functions because calling them is expensive."""

    python: tuple[int, int, int] = (3, 11, 0)
    versions: Mapping[str, str] = field(default_factory=dict)
    jax_requires: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    attached_tpu: str | None = None
    lock: Lock | None = None
    sight: Callable[[], DeviceProbe] = DeviceProbe
    gpu_compiler_failure: Callable[[], str | None] = lambda: None  # compiles a tiny program
    runs_free_bytes: int = 0
    cache_folder: str = ""
    jax_bytecode: str = ""  # path of the bytecode of jax/__init__.py, whether it exists or not
    unwritable: Callable[[str], str | None] = lambda folder: None  # why a folder is not writable, or None
    file_exists: Callable[[str], bool] = lambda path: True
    memory_available_bytes: int | None = None
    shm_bytes: int | None = None
    metadata: Callable[[str], str | None] = lambda name: None  # attributes of a cloud machine

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        return cls(
            python=sys.version_info[:3],
            versions={name: version for name in PACKAGES if (version := _version(name))},
            jax_requires=tuple(importlib.metadata.requires("jax") or ()) if _version("jax") else (),
            environment=dict(os.environ),
            attached_tpu=ThisMachine().attached_tpu(),
            lock=read_lock(),
            sight=cache(probe_devices),
            gpu_compiler_failure=cache(failure_of_gpu_compiler),
            runs_free_bytes=shutil.disk_usage(_existing(Path("runs"))).free,
            cache_folder=cache_folder(os.environ),
            jax_bytecode=_bytecode("jax"),
            unwritable=_unwritable,
            file_exists=os.path.exists,
            memory_available_bytes=_memory_available(),
            shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
            metadata=attribute if ThisMachine().attached_tpu() else lambda name: None,
        )


def cache_folder(environment: Mapping[str, str]) -> str:
    """Return the folder of compiled programs: that of jax's variable, else forerun's folder in the user's cache."""
    given = environment.get("JAX_COMPILATION_CACHE_DIR")
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
    return given or os.path.join(base, "forerun")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bytecode(package: str) -> str:
    """Return the path of a package's bytecode, or an empty string if the package is not installed."""
    found = importlib.util.find_spec(package)
    return importlib.util.cache_from_source(found.origin) if found and found.origin else ""


def _existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent that exists."""
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


def _unwritable(folder: str) -> str | None:
    """Return why the folder (or the nearest existing parent) is not writable, or None if it is."""
    try:
        with tempfile.TemporaryFile(dir=_existing(Path(folder))):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _memory_available() -> int | None:
    """Return the available memory in bytes, or None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
