"""The template process that all commands of a user share, and the private folder of its socket.

The name of the socket is a hash of everything that the imported modules depend on: the interpreter, the versions and
the source of the packages, and the environment variables that are read at import time. A command with other values
starts another template. Only processes of the same user are accepted, on both sides.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from forerun.planner.compile.template import peer_pid, peer_uid

SETTING = "FORERUN_WARM_WORKERS"
PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "numpy", "pydantic")
# Variables that Python, jax and their libraries read when they are imported. Workers get all others with the request.
READ_AT_IMPORT = ("PYTHON", "JAX", "XLA_PYTHON", "LD_", "CUDA", "NVIDIA", "OMP_", "OPENBLAS", "MKL_", "HF_", "FORERUN")
LONGEST_PATH_BYTES = 100  # of a Unix socket; Linux allows 107
SOURCE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SharedTemplate:
    """A running template process."""

    pid: int
    memory_bytes: int | None


def is_wanted(environment: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether a command may leave a template process for later commands.

    The user decides with FORERUN_WARM_WORKERS=1 or 0. Otherwise a template is kept only in a terminal, never in CI.
    """
    setting = environment.get(SETTING, "")
    if setting in ("0", "1"):
        return setting == "1"
    return is_terminal and not environment.get("CI")


def folder() -> Path:
    """Return the folder of the sockets: in the user's runtime folder, or else in the cache folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "forerun"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "workers"


def key(environment: Mapping[str, str]) -> str:
    """Return a hash of what the state of a template depends on."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    variables = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    limits = [resource.getrlimit(resource.RLIMIT_AS), os.nice(0)]
    interpreter = [sys.version, sys.path, sys.executable]
    content = [interpreter, versions, variables, limits, list(source_state())]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def source_state() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the size and the time of each source file of forerun."""
    for place, folders, names in os.walk(SOURCE):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith((".py", ".csv")):
                found = os.stat(os.path.join(place, name))
                yield name, found.st_size, found.st_mtime_ns


def connector(
    environment: Mapping[str, str], spawn: Callable[[socket.socket, Path], None]
) -> Callable[[], socket.socket]:
    """Return a function that connects to the shared template. Start the template with `spawn` if none runs.

    Raises:
        OSError: The folder is not private, or a socket cannot be created there.
    """
    place = private_folder()
    path = place / f"{key(environment)}.socket"
    if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
        raise OSError(f"{path} is too long for a socket")
    try:
        connect(path).close()
    except OSError:
        with (place / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connect(path).close()  # another command has started it since
            except OSError:
                path.unlink(missing_ok=True)
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(path))
                    listener.listen()  # from now on, clients wait until the template has imported its modules
                    spawn(listener, path)
    return lambda: connect(path)


def private_folder() -> Path:
    """Return the folder of the sockets, which only the user can open. Create it if necessary.

    Raises:
        OSError: The folder belongs to another user, or others may open it.
    """
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{place} is not private")
    return place


def connect(path: Path) -> socket.socket:
    """Connect to a socket whose process belongs to this user; raise OSError otherwise."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        if peer_uid(connection) != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def running_templates() -> list[SharedTemplate]:
    """Return the shared templates of this user that run."""
    found = []
    with suppress(OSError):
        for path in sorted(folder().glob("*.socket")):
            with suppress(OSError), connect(path) as connection:
                pid = peer_pid(connection)
                found.append(SharedTemplate(pid, _memory_bytes(pid)))
    return found


def _memory_bytes(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None
