"""A Ray cluster of three nodes on this machine, and a driver process: both can be killed without grace."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 240.0  # only a hang takes that long
STORE_BYTES = 80 << 20
STARTS = 5
# Set before Ray is imported. No process of the rig sends statistics or prints the log of a node that is lost. Workers
# have the priority of the tests: with Ray's niceness of 15, they would wait for all other processes of the machine.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": ".*", "RAY_worker_niceness": "0"}

DRIVER = """
import json, sys
from pathlib import Path
from forerun.config.schema import Part
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens import unit
from forerun.data.tokens.build import build
from forerun.data.tokens.engines.pool import Pool
from forerun.data.tokens.engines.ray_cluster import ray_cluster
from forerun.data.tokens.recipe import recipe_for
address, path, tokenizer, root, unit_bytes = json.loads(sys.argv[1])
unit.unit_bytes = lambda total: unit_bytes
def tell(progress):
    print(progress.units_done, flush=True)
source, recipe = open_source(Part(path=path)), recipe_for(load_tokenizer(tokenizer), validation=0.1)
if address is None:
    build(source, recipe, Path(root), progress=tell)
else:
    with ray_cluster(address) as cluster:
        build(source, recipe, Path(root), progress=tell, engine=cluster)
print("finished", flush=True)
"""


class RayRig:
    """A cluster with a head and two other nodes of one core each. The driver connects to the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES},
        )
        self.nodes = [self._add(), self._add()]
        self._cluster.wait_for_nodes(PATIENCE_SECONDS)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_node(self, which: int) -> int:
        """Kill all processes of a node with SIGKILL, and return their number."""
        node = self.nodes.pop(which)
        own = [one.process.pid for many in node.all_processes.values() for one in many]
        doomed = [*own, *(child for process in own for child in descendants(process))]
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        return len(doomed)

    def replace_node(self) -> None:
        """Add a node for one that was killed."""
        self.nodes.append(self._add())
        self._cluster.wait_for_nodes(PATIENCE_SECONDS)

    def end(self) -> None:
        self._cluster.shutdown()

    def _add(self) -> Any:
        """Add a node. Ray waits only 30 s for its start, which is too short on a busy machine."""
        for attempt in range(STARTS):
            try:
                return self._cluster.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES)
            except Exception:
                if attempt + 1 == STARTS:
                    raise
        return None


@contextmanager
def three_nodes() -> Iterator[RayRig]:
    """Start a cluster, and end all its processes at the end."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    rig = RayRig()
    try:
        yield rig
    finally:
        rig.end()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Driver:
    """A driver process that builds a store: on the cluster at `address`, or with local processes if it is None."""

    def __init__(self, address: str | None, data: Path, tokenizer: str, root: Path, unit_bytes: int) -> None:
        task = json.dumps([address, str(data), tokenizer, str(root), unit_bytes])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, task], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
        )
        self.lines: list[str] = []

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        """Read the output until the condition holds or the process ends. Return whether the condition held."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if not self._read(0.02):
                return condition()
        return False

    def units_done(self) -> int:
        return max((int(line) for line in self.lines if line.isdecimal()), default=0)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def finish(self) -> None:
        """Wait for the end. Raise RuntimeError with the output if the build failed."""
        out, errors = self._process.communicate(timeout=PATIENCE_SECONDS)
        self.lines += out.decode().splitlines()
        if self._process.returncode or "finished" not in self.lines:
            raise RuntimeError(f"the driver failed ({self._process.returncode}): {errors.decode()[-4000:]}")

    def _read(self, seconds: float) -> bool:
        """Read lines that arrive within `seconds`. Return False if the process has closed its output."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not readable:
            return True
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        self.lines += data.decode().splitlines()
        return bool(data)


def descendants(process: int) -> list[int]:
    """Return the ids of all processes that a process has started, and of those that they have started."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = [], [process]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def write_rows(folder: Path, megabytes: float) -> Path:
    """Write a corpus of two files, always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps"]
    for name, start in (("a.jsonl", 0), ("b.jsonl", 1)):
        with (folder / name).open("w", encoding="utf-8") as file:
            number, size = start, 0
            while size < megabytes * 5e5:
                text = " ".join(words[(number * k + k // 3) % len(words)] for k in range(20 + number % 200))
                size += file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
                number += 2
    return folder


def contents(root: Path) -> dict[str, bytes]:
    """Return all files of all stores below `root`."""
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def finished_units(root: Path) -> dict[str, int]:
    """Return the inode of each finished unit: a unit that is built again has another one."""
    return {str(file.parent): file.stat().st_ino for file in root.glob("*/unit-*-of-?????/unit.json")}


def marker(root: Path) -> bool:
    """Return whether a driver has begun to give units to the cluster."""
    return any(root.glob("*/cluster.*.part"))
