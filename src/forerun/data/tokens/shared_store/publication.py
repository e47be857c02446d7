"""How a unit becomes visible: its files are written to a temporary folder of this machine and then published.

- In a folder, one rename makes the unit visible.
- In a bucket, each file is created with a condition, and the summary last. A unit exists if its summary exists.

The bytes of a unit depend only on the data and the recipe. A file that exists already, because a writer was killed or
another machine builds the same unit, is therefore equal. It is compared, and replaced if it is damaged.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from pathlib import Path

from forerun.data.source.identity import cache_folder
from forerun.storage.folder import FileRange, Folder

LEFTOVER_SECONDS = 2 * 24 * 3600.0
COMPARED_BYTES = 1 << 24  # read at a time when a published file is compared


def local_folder(store: Folder) -> Path:
    """Return the folder of this machine for files that belong to a store, such as packing plans and unfinished units.

    It is the folder of the store itself, or a folder of the cache for a store in a bucket.
    """
    if store.is_local:
        return Path(store.address)
    return cache_folder() / "stores" / store.address.rpartition("/")[2]


def publish(written: Path, store: Folder, name: str, summary: str) -> None:
    """Make the files of the folder `written` visible as the unit `name`, and remove the folder.

    If another process has published the unit in the meantime, its files are kept.

    Args:
        written: A temporary folder with all files of the unit.
        store: The store.
        name: The name of the unit.
        summary: The name of the file that is created last.
    """
    if store.is_local:
        final = Path(store.address) / name
        try:
            written.rename(final)
        except OSError:
            if not (final / summary).exists():
                raise
            shutil.rmtree(written)
        return
    unit = store.inside(name)
    if unit.read_many([summary]) == [None]:
        others = sorted(file.name for file in written.iterdir() if file.name != summary)
        for file in [*others, summary]:
            _create(unit, file, (written / file).read_bytes())
    shutil.rmtree(written)


def _create(unit: Folder, file: str, content: bytes) -> None:
    if not unit.create(file, content) and not _is_equal(unit, file, content):
        unit.replace(file, content)


def _is_equal(unit: Folder, file: str, content: bytes) -> bool:
    """Return whether a published file has this content. Large files are read in parts."""
    size = len(content)
    for start in range(0, size, COMPARED_BYTES):
        stop = min(start + COMPARED_BYTES, size)
        if unit.read_ranges([FileRange(file, start, stop)]) != [content[start:stop]]:
            return False
    return unit.read_ranges([FileRange(file, size, size + 1)]) == [b""]


def part_name(name: str) -> str:
    """Return a unique temporary name that contains a hash of the host and the process id of the writer.

    An example is `unit-00012-of-00096.1f2e3d4c-4711-9a8b7c6d.part`.
    """
    return f"{name}.{_host()}-{os.getpid()}-{os.urandom(4).hex()}.part"


def remove_leftovers(store: Folder) -> None:
    """Remove temporary files and folders of writers that have ended.

    For writers on this machine only the process counts, not the age: a clock that jumps must not destroy the work of
    a live process. Files of other machines are removed if they have not changed for two days.
    """
    for part in local_folder(store).glob("*.part"):
        host, process, *_ = [*part.name.split(".")[-2].split("-"), ""]  # names of `atomic_write` have no process
        try:
            old = time.time() - part.stat().st_mtime > LEFTOVER_SECONDS
        except OSError:
            continue
        if not _is_running(process) if host == _host() else old:
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def _is_running(process: str) -> bool:
    """Return whether a process is running. A zombie, which is still in /proc with the state Z, is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
