"""A Slurm cluster on this machine: a real munged, a real slurmctld, and a real slurmd for each node.

Each slurmd runs in its own PID namespace. Ending the first process of the namespace ends everything on the node at
once, as the loss of a machine does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class SlurmCluster:
    """Starts the daemons on entry and ends them on exit. The nodes are called n0, n1, ..."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration())
        paths = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in paths.items()]
        try:
            self._start("munged", ["munged", "--foreground", "--force", f"--key-file={key}", *options])
            until(paths["socket"].exists, "munged does not listen")
            self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf")])
            for node in range(self.nodes):
                self.start_node(node)
            until(lambda: self.idle_nodes() == self.nodes, "no idle nodes")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in reversed(list(self._daemons)):
            self._end(name)

    def start_node(self, node: int) -> None:
        (self.folder / f"n{node}").mkdir(exist_ok=True)
        slurmd = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", f"n{node}"]
        # --kill-child: the namespace ends with the process that this class knows.
        self._start(f"n{node}", ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *slurmd])

    def lose_node(self, node: int) -> None:
        """End everything on a node at once."""
        self._end(f"n{node}")

    def command(self, *words: str) -> str:
        """Return the output of a Slurm command."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    def idle_nodes(self) -> int:
        """Return the number of nodes that answer and on which nothing runs."""
        return int(self.command("sinfo", "-h", "-t", "idle", "--responding", "-o", "%D") or 0)

    def submit(self, script: Path, environment: dict[str, str]) -> str:
        """Submit a batch script and return the number of the job."""
        words = ["sbatch", "--parsable", str(script)]
        env = {**self.environment, **environment}
        return subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.command("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _start(self, name: str, words: list[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=self.environment
            )

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(30)

    def _configuration(self) -> str:
        host, ports = socket.gethostname().split(".")[0], free_ports(self.nodes + 1)
        nodes = "".join(
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000\n"
            for node, port in enumerate(ports[1:])
        )
        folder = self.folder
        return (
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nCryptoType=crypto/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/%n.pid\n"
            f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/linear\nMpiDefault=none\n"
            # A node that does not answer for 10 s is lost, and its job is requeued.
            "SchedulerType=sched/builtin\nReturnToService=2\nSlurmdTimeout=10\nJobRequeue=1\n"
            f"{nodes}PartitionName=main Nodes=ALL Default=YES State=UP\n"
        )


def until(reached: Callable[[], bool], problem: str, seconds: float = 120) -> None:
    """Wait until a condition holds. The limit is generous, because it only ends tests that fail."""
    limit = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > limit:
            raise TimeoutError(problem)
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]
