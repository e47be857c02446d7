"""The process that starts and kills the nodes of a Ray cluster on this machine: `python tests/faults/ray_nodes.py`.

It prints the address of the cluster, then reads calls as lines of JSON, such as `["kill", 0]`, and prints an answer to
each. It ends the cluster and itself when its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_SECONDS = 240.0  # only a hang takes that long
STORE_BYTES = 80 << 20
STARTS = 5

T = TypeVar("T")


class Nodes:
    """A head and two other nodes of one core each."""

    def __init__(self) -> None:
        self._cluster = _started(_head)
        self.nodes = [self._add(), self._add()]
        self._cluster.wait_for_nodes(PATIENCE_SECONDS)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill(self, which: int) -> int:
        """Kill all processes of a node with SIGKILL, and return their number."""
        node = self.nodes.pop(which)
        own = [one.process.pid for many in node.all_processes.values() for one in many]
        doomed = [*own, *(child for process in own for child in descendants(process))]
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        return len(doomed)

    def replace(self) -> int:
        """Add a node for one that was killed. Return the number of nodes beside the head."""
        self.nodes.append(self._add())
        self._cluster.wait_for_nodes(PATIENCE_SECONDS)
        return len(self.nodes)

    def end(self) -> None:
        self._cluster.shutdown()

    def _add(self) -> Any:
        return _started(lambda: self._cluster.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES))


def _head() -> Any:
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    return Cluster(initialize_head=True, head_node_args=options)


def _started(start: Callable[[], T]) -> T:
    """Return the result of `start`. Ray waits only 30 s for a node, which is too short on a busy machine."""
    for _ in range(STARTS - 1):
        with suppress(Exception):
            return start()
    return start()


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


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints to the standard output
    nodes = Nodes()
    try:
        print(json.dumps(nodes.address), file=answers)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            call = {"kill": nodes.kill, "replace": nodes.replace}[name]
            print(json.dumps(call(*arguments)), file=answers)
    finally:
        nodes.end()


if __name__ == "__main__":
    main()
