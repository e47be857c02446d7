"""The work of a node of a Ray cluster. Ray runs these functions in its worker processes, so Ray is not imported here.

Each of them has one worker process (`worker.py`) as its child, which keeps its tokenizer from unit to unit. A child has
an exit code and its own stderr, so an allocation that fails is distinguished from a node that is lost.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun import version
from forerun.data.source.files import File
from forerun.data.source.sources import Source
from forerun.data.tokens.engines.worker_process import WorkerProcess
from forerun.data.tokens.recipe import BYTES
from forerun.data.tokens.shared_store.publication import remove_leftovers
from forerun.data.tokens.unit import Unit
from forerun.errors import UserError
from forerun.storage.address import Address
from forerun.storage.open_folder import folder_at

FILES_CHECKED = 200  # of the source, per process: one request each


@dataclass(frozen=True)
class Shipment:
    """Everything that a node needs to build units. It contains no credentials: each node has its own."""

    key: str  # unique for a build
    task: dict[str, Any]
    tokenizer: bytes | None  # the content of the tokenizer file; None for bytes
    marker: str  # the name of a file in the store whose content is `key`
    folder: str  # the working folder of the driver: names of files may be relative to it
    versions: dict[str, str]  # of the packages that determine the bytes of a unit


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the bytes of a unit."""
    return {"forerun": version.__version__, "tokenizers": importlib.metadata.version("tokenizers")}


class NodeWorker:
    """A worker process on a node, and the tokenizer file that it reads."""

    def __init__(self, shipment: Shipment) -> None:
        self.key = shipment.key
        require_node(shipment)
        self._folder = tempfile.TemporaryDirectory(prefix="forerun-")
        recipe = dict(shipment.task["recipe"])
        if shipment.tokenizer is not None and not _holds(recipe["tokenizer"], shipment.tokenizer):
            file = Path(self._folder.name) / "tokenizer.json"
            file.write_bytes(shipment.tokenizer)
            recipe["tokenizer"] = str(file)
        if not Address.of(shipment.task["store"]).is_bucket:
            remove_leftovers(folder_at(shipment.task["store"]))  # of writers on this node that have died
        self._task = shipment.task | {"recipe": recipe}
        self._working_folder = shipment.folder if os.path.isdir(shipment.folder) else None
        self._process: WorkerProcess | None = None

    def messages(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        """Yield the messages about a unit, as `WorkerProcess` does. A process that has died is replaced."""
        self._process = self._process or WorkerProcess(self._task, self._working_folder)
        for kind, content in self._process.messages(unit):
            if kind == "died":
                self._process = None
            yield kind, content

    def end(self) -> None:
        """Kill the process and remove the tokenizer file."""
        if self._process is not None:
            self._process.kill()
            self._process.stop()
            self._process = None
        self._folder.cleanup()


_worker: NodeWorker | None = None  # of this process; it is replaced if a unit of another build arrives


def build_unit(
    key: str, receive: Callable[[], Shipment], unit: dict[str, Any], report_seconds: float
) -> Iterator[tuple[str, Any]]:
    """Build a unit, and yield messages about it. The last one is not `progress`.

    Args:
      key: the key of the shipment.
      receive: returns the shipment; called only if this process has none, because it may be large.
      unit: the unit, in types of JSON.
      report_seconds: the least time between two messages with the progress.
    """
    global _worker
    try:
        if _worker is None or _worker.key != key:
            _forget()
            _worker = NodeWorker(receive())
    except UserError as error:
        yield "error", error.parts()
        return
    last_report = time.monotonic()
    try:
        for kind, content in _worker.messages(Unit.from_json(unit)):
            if kind == "progress" and time.monotonic() - last_report < report_seconds:
                continue
            last_report = time.monotonic()
            yield kind, content
    except BaseException:  # the driver has cancelled the unit
        _forget()
        raise


def node_problem(shipment: Shipment) -> dict[str, Any] | None:
    """Return the parts of the error if this node cannot build units, else None."""
    try:
        require_node(shipment)
    except UserError as error:
        return error.parts()
    return None


def require_node(shipment: Shipment) -> None:
    """Raise UserError if this node has another version of forerun, or does not see the store or the data."""
    host = socket.gethostname()
    if differing := [name for name, one in versions().items() if shipment.versions.get(name) != one]:
        here, there = (
            ", ".join(f"{name} {v.get(name)}" for name in differing) for v in (versions(), shipment.versions)
        )
        raise UserError(
            "E-DATA-197",
            f"node {host} has {here}, but this command has {there}",
            why="all nodes must build the same bytes",
            fix="install the same versions on every node",
        )
    store = str(shipment.task["store"])
    if problem := _store_problem(store, shipment):
        raise UserError(
            "E-DATA-198",
            f"node {host} does not see the store in {store}",
            why=problem,
            fix="use a bucket, data.store=gs://BUCKET/tokens or s3://BUCKET/tokens, or a folder that all nodes share",
        )
    for file in _some(Source.from_json(shipment.task["source"]).files):
        if problem := _file_problem(file, shipment.folder):
            raise UserError(
                "E-DATA-199",
                f"node {host} cannot read {file.name}",
                why=problem,
                fix="put the data into a bucket (gs:// or s3://) that all nodes may read, or into a shared folder",
            )


def _store_problem(store: str, shipment: Shipment) -> str | None:
    try:
        content = folder_at(store).read(shipment.marker)
    except UserError as error:
        return f"{error.what}: {error.why}"
    except FileNotFoundError:
        return f"the file {shipment.marker}, which the driver wrote there, is missing"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None if content == shipment.key.encode() else f"the file {shipment.marker} has another content"


def _file_problem(file: File, folder: str) -> str | None:
    found = file if file.store is not None else replace(file, path=os.path.join(folder, file.path))
    try:
        with found.open():
            return None
    except UserError as error:
        return error.why


def _some(files: tuple[File, ...]) -> list[File]:
    """Return at most FILES_CHECKED files, evenly distributed."""
    count = min(len(files), FILES_CHECKED)
    return [files[number * len(files) // count] for number in range(count)]


def _holds(path: str, content: bytes) -> bool:
    """Return whether the file `path` exists on this node with this content."""
    if path == BYTES:
        return True
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(content).digest()
    except OSError:
        return False


def _forget() -> None:
    global _worker
    if _worker is not None:
        _worker.end()
        _worker = None
