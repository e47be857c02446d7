"""The engine of a Ray cluster: each unit is a task, on any node that is alive.

The driver holds no state that it could lose. The store has the finished units, and another driver builds the others.
A task yields its messages (a streaming generator), so that its progress is known. Such a task must not be retried by
Ray, which expects the same messages again. The engine submits the unit again instead.

Each worker of Ray on a node has one worker process (`worker.py`) as its child, which keeps its tokenizer from unit to
unit. A child has an exit code and its own stderr, so an allocation that fails is distinguished from a node that is
lost.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from forerun import version
from forerun.data.source.files import File
from forerun.data.source.sources import Source
from forerun.data.tokens.recipe import BYTES
from forerun.data.tokens.unit import Unit, part_name, remove_leftovers
from forerun.data.tokens.worker_pool import ATTEMPTS, Event, StartEngine, WorkerProcess, in_order
from forerun.errors import UserError, first_line
from forerun.installation import install_command
from forerun.safe_text import redact
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
    files = Source.from_json(shipment.task["source"]).files
    checked = min(len(files), FILES_CHECKED)  # evenly distributed
    for file in (files[number * len(files) // checked] for number in range(checked)):
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


LOSSES = 20  # of nodes or Ray workers, for one unit: preempted nodes come and go
WAIT_SECONDS = 1.0
NODE_CHECK_SECONDS = 120.0
MESSAGES_PER_SECOND = 100.0  # of all tasks together, for the progress
LEAST_REPORT_SECONDS = 0.5


@contextmanager
def ray_cluster(address: str) -> Iterator[StartEngine]:
    """Connect to a running Ray cluster, yield what starts its engine, and disconnect at the end.

    A connection of the caller is used and kept.

    Args:
      address: `auto` for the cluster of this machine or of RAY_ADDRESS, or HOST:PORT of the head node.

    Raises:
      UserError: Ray is not installed, or there is no such cluster.
    """
    ray = _ray()
    if ray.is_initialized():
        yield partial(RayEngine, ray)
        return
    _connect(ray, address)
    try:
        yield partial(RayEngine, ray)
    finally:
        ray.shutdown()


class RayEngine:
    """The engine of a Ray cluster. `workers` limits the units that are built at the same time."""

    def __init__(self, ray: Any, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> None:
        self._ray, self._task, self._workers = ray, task, workers
        self._waiting = list(reversed(units))
        self._running: dict[Any, Unit] = {}  # by the generator of messages of a task
        self._deaths: Counter[int] = Counter()
        self._losses: Counter[int] = Counter()
        self._limit: int | None = None
        self._build = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_build_unit)

    def events(self) -> Iterator[Event]:
        """Check the nodes, submit the units and yield events until every unit is finished or has failed.

        Raises:
          UserError: A node cannot build units, or the connection to the cluster is lost.
        """
        shipment = _shipment(self._task)
        folder = folder_at(self._task["store"])
        folder.create(shipment.marker, shipment.key.encode())
        try:
            shipped = self._ray.put(shipment)
            self._check_nodes(shipped)
            while self._submit(shipment.key, shipped):
                for generator in self._ready():
                    yield from self._received(generator)
        except self._ray.exceptions.RayError as error:
            raise UserError(
                "E-DATA-200",
                "the connection to the Ray cluster is lost",
                why=_type_and_text(error),
                fix="run the same command again when the cluster runs; finished units are kept",
            ) from error
        finally:
            self.end()
            folder.remove(shipment.marker)

    def up_to(self, unit: Unit) -> None:
        """Submit no more units after this one, and cancel those that are submitted."""
        self._limit = unit.number if self._limit is None else min(self._limit, unit.number)
        self._cancel(self._limit)

    def end(self) -> None:
        """Cancel all tasks. The nodes stop their worker processes."""
        self._cancel(-1)
        self._running.clear()

    def _submit(self, key: str, shipped: Any) -> bool:
        """Submit the next units, in order. Return whether any task is left.

        Twice the units that can run are submitted. A node then always has a next unit, and a cluster that scales with
        its load adds nodes.
        """
        cores = max(1, int(self._ray.cluster_resources().get("CPU", 1))) if self._waiting else 1
        most = 2 * cores if self._workers is None else self._workers
        seconds = max(LEAST_REPORT_SECONDS, cores / MESSAGES_PER_SECOND)
        while self._waiting and len(self._running) < most:
            if self._limit is not None and self._waiting[-1].number > self._limit:
                break
            unit = self._waiting.pop()
            self._running[self._build.remote(key, [shipped], unit.to_json(), seconds)] = unit
        return bool(self._running)

    def _ready(self) -> list[Any]:
        """Return the tasks that have a message or have ended; none after a second without any."""
        running = list(self._running)
        ready, _ = self._ray.wait(running, num_returns=1, timeout=WAIT_SECONDS)
        if ready and len(running) > 1:
            ready, _ = self._ray.wait(running, num_returns=len(running), timeout=0)
        return list(ready)

    def _received(self, generator: Any) -> Iterator[Event]:
        """Yield the next event of a task. Submit its unit again if the node or its worker is lost."""
        if (unit := self._running.get(generator)) is None:
            return  # an event before this one was a failure, so the task was cancelled
        try:
            kind, content = self._ray.get(next(generator))
        except StopIteration:
            del self._running[generator]
            return
        except self._ray.exceptions.RayError as error:
            del self._running[generator]
            yield from self._lost(unit, error)
            return
        if kind != "died":
            yield Event(kind, unit, content)
            return
        self._deaths[unit.number] += 1
        if content["no_memory"] or self._deaths[unit.number] >= ATTEMPTS:
            yield Event(kind, unit, content)
        else:
            self._again(unit)

    def _lost(self, unit: Unit, error: Exception) -> Iterator[Event]:
        """Submit a unit again whose task failed, or yield an event if that does not help."""
        exceptions = self._ray.exceptions
        if self._limit is not None and unit.number > self._limit:
            return  # its task was cancelled
        if isinstance(error, exceptions.RayTaskError):
            about = {"where": None, "error": _type_and_text(error.cause or error), "trace": str(error)[-4000:]}
            yield Event("bug", unit, about)
            return
        if isinstance(error, exceptions.OutOfMemoryError):
            self._deaths[unit.number] += 1
            if self._deaths[unit.number] >= ATTEMPTS:
                yield Event("died", unit, {"code": -signal.SIGKILL, "said": str(error)[-2000:], "no_memory": False})
                return
        self._losses[unit.number] += 1
        if self._losses[unit.number] < LOSSES:
            self._again(unit)
            return
        lost = UserError(
            "E-DATA-201",
            f"{unit.name} was lost {LOSSES} times, with its node or its Ray worker",
            why=_type_and_text(error),
            fix="look at the nodes with `ray status`, then run the same command again; finished units are kept",
        )
        yield Event("error", unit, lost.parts())

    def _again(self, unit: Unit) -> None:
        self._waiting.append(unit)
        in_order(self._waiting)

    def _cancel(self, limit: int) -> None:
        """Cancel the tasks of units after number `limit`. Their events are not yielded."""
        for generator in [one for one, unit in self._running.items() if unit.number > limit]:
            del self._running[generator]
            with suppress(Exception):  # the connection may be lost, which ends the tasks too
                self._ray.cancel(generator)

    def _check_nodes(self, shipped: Any) -> None:
        """Raise UserError if a node cannot build units. A node that joins later is checked by its first unit."""
        check = self._ray.remote(num_cpus=0, max_retries=0)(_check_node)
        pin = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        checks = {
            check.options(scheduling_strategy=pin(node["NodeID"], soft=False)).remote([shipped]): node for node in nodes
        }
        done, _ = (
            self._ray.wait(list(checks), num_returns=len(checks), timeout=NODE_CHECK_SECONDS) if checks else ([], [])
        )
        for one in done:
            try:
                problem = self._ray.get(one)
            except self._ray.exceptions.RayError as error:
                if "No module named" in str(error) or "failed to import" in str(error):
                    raise UserError(
                        "E-DATA-196",
                        f"node {checks[one]['NodeManagerHostname']} cannot import forerun",
                        why=_type_and_text(error),
                        fix=f"install the same version on every node, then restart its Ray: {install_command('ray')}",
                    ) from error
                continue  # the node is lost, and the others do its work
            if problem is not None:
                raise UserError(**problem)


def _build_unit(key: str, shipped: list[Any], unit: dict[str, Any], seconds: float) -> Iterator[tuple[str, Any]]:
    ray = importlib.import_module("ray")
    yield from build_unit(key, lambda: ray.get(shipped[0]), unit, seconds)


def _check_node(shipped: list[Any]) -> dict[str, Any] | None:
    return node_problem(importlib.import_module("ray").get(shipped[0]))


def _shipment(task: dict[str, Any]) -> Shipment:
    """Return what the nodes need. Raise UserError if it would contain a secret."""
    for address, *_ in task["source"]["files"]:
        if redact(address) != address:
            raise UserError(
                "E-DATA-202",
                f"{redact(address)} cannot be read on a cluster",
                why="its address contains a password or a query, and Ray keeps and shows the arguments of tasks",
                fix="put the data into a bucket (gs:// or s3://), which each node reads with its own credentials",
            )
    path = task["recipe"]["tokenizer"]
    tokenizer = None if path == BYTES else Path(path).read_bytes()
    return Shipment(secrets.token_hex(8), task, tokenizer, part_name("cluster"), os.getcwd(), versions())


def _ray() -> Any:
    """Import and return Ray. Raise UserError if it is not installed.

    Ray prints the log of a node that is lost to stdout. The variable, which Ray reads at import, prevents it.
    """
    name = "RAY_DEDUP_LOGS_SKIP_REGEX"
    before = os.environ.get(name)
    os.environ.setdefault(name, ".*")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError(
            "E-DATA-195",
            "--ray needs Ray",
            why=f"import ray: {error}",
            fix=install_command("ray"),
        ) from error
    finally:
        if before is None:
            del os.environ[name]


def _connect(ray: Any, address: str) -> None:
    """Connect to the cluster. Ray replaces the handler of SIGTERM, which is restored."""
    if Address.of(address).protocol == "ray":
        raise UserError(
            "E-DATA-203",
            f"--ray {address}: the Ray client is not supported",
            why="it cannot receive the messages of a task while the task runs",
            fix="run the command on a node of the cluster with --ray auto, for example by `ray job submit`",
        )
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError and others
        raise UserError(
            "E-DATA-204",
            f"--ray {address}: no connection to a Ray cluster",
            why=_type_and_text(error),
            fix="start one with `ray start --head`, or name the head node: --ray HOST:6379",
        ) from error
    finally:
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _type_and_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
