"""A Ray cluster of three nodes on this machine, and a driver process: both can be killed without grace."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 240.0  # only a hang takes that long
# No process of the rig sends statistics or prints the log of a node that is lost. Workers
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
from forerun.data.tokens.worker_pool import Pool
from forerun.data.tokens.ray_cluster import ray_cluster
from forerun.data.tokens.recipe import recipe_for
address, path, tokenizer, root, unit_bytes = json.loads(sys.argv[1])
unit.unit_bytes = lambda total: unit_bytes
def tell(progress):
    print(progress.units_done, flush=True)
source, recipe = open_source(Part(path=path)), recipe_for(load_tokenizer(tokenizer), validation=0.1)
if address is None:
    build(source, recipe, Path(root), on_unit=tell)
else:
    with ray_cluster(address) as cluster:
        build(source, recipe, Path(root), on_unit=tell, engine=cluster)
print("finished", flush=True)
"""


class RayRig:
    """A cluster with a head and two other nodes of one core each, in a process of its own (`ray_nodes.py`).

    Ray leaves sockets and pipes to the garbage collector, which a test must not report as its own.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("ray_nodes.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | QUIET,
        )
        self.address = str(self._answer())

    def kill_node(self, which: int) -> int:
        """Kill all processes of a node with SIGKILL, and return their number."""
        return int(self._ask("kill", which))

    def replace_node(self) -> None:
        """Add a node for one that was killed."""
        self._ask("replace")

    def end(self) -> None:
        """End all processes of the cluster."""
        self._process.communicate(timeout=PATIENCE_SECONDS)

    def _ask(self, *call: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process of the cluster ended with code {self._process.wait()}"
        return json.loads(line)


@contextmanager
def three_nodes() -> Iterator[RayRig]:
    """Start a cluster, and end all its processes at the end."""
    rig = RayRig()
    try:
        yield rig
    finally:
        rig.end()


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
