"""Faults of the network between hosts: `python tests/faults/hosts_net_rig.py FAULT TRIALS [SECONDS]`, as root.

Every host has a network namespace of its own with a link to a common router. FAULT is `cut` (a host's link goes down
for SECONDS), `scan` (a stranger on another network of host 0 looks for open ports) or `intruder` (a process inside the
cluster's network tries to join jax's coordinator, under a host's number, at every port of host 0). One JSON line per
trial.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts_job import HostsJob, gone
from hosts_worker import chained

HOSTS = 3
LEADER = "10.77.0.2"
INTRUDER = """
import sys, jax
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(sys.argv[1], 3, 1, initialization_timeout=15)
"""
LOOK = """
import socket, sys
found = []
for address in sys.argv[1].split(","):
    for port in sys.argv[2].split(","):
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((address, int(port))) == 0:
                found.append(f"{address}:{port}")
print(" ".join(found))
"""


class Net:
    """Namespaces h0 .. hN and `inside`, each with a link to a router, and `outside`, with a link to host 0 only."""

    def __init__(self) -> None:
        self.prefix = f"fr{os.getpid()}"
        self.names = [*(f"h{index}" for index in range(HOSTS)), "inside", "outside", "router"]

    def run(self, name: str, *words: str, timeout: float = 60) -> str:
        done = subprocess.run(
            [*self.within(name), *words], capture_output=True, text=True, timeout=timeout, check=False
        )
        return done.stdout + (done.stderr if done.returncode else "")

    def within(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self.prefix}{name}"]

    def host(self, index: int) -> list[str]:
        return self.within(f"h{index}")

    def link(self, name: str, to: str, device: str, network: str) -> None:
        """`name` gets .2 and `to` gets .1 of the network."""
        port = f"p{name}{device}"
        here, there = f"{self.prefix}{name}", f"{self.prefix}{to}"
        ip("link", "add", device, "netns", here, "type", "veth", "peer", "name", port, "netns", there)
        for place, end, address in ((name, device, f"{network}.2/24"), (to, port, f"{network}.1/24")):
            self.run(place, "ip", "address", "add", address, "dev", end)
            self.run(place, "ip", "link", "set", end, "up")

    def cut(self, index: int, how: str) -> None:
        """At the router's end, as a cable would be: the host's own routes stay."""
        self.run("router", "ip", "link", "set", f"ph{index}eth", how)

    def __enter__(self) -> Net:
        for name in self.names:
            ip("netns", "add", f"{self.prefix}{name}")
            self.run(name, "ip", "link", "set", "lo", "up")
        self.run("router", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for index, name in enumerate(self.names[: HOSTS + 1]):
            self.link(name, "router", "eth", f"10.77.{index}")
            self.run(name, "ip", "route", "add", "default", "via", f"10.77.{index}.1")
            folder = Path(f"/etc/netns/{self.prefix}{name}")  # ip shows these files as /etc/hosts inside
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.{index}.2 {os.uname().nodename}\n")
        self.link("outside", "h0", "eth", "10.78.0")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            ip("netns", "delete", f"{self.prefix}{name}")
            shutil.rmtree(f"/etc/netns/{self.prefix}{name}", ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def job_on(net: Net, kind: str, steps: int, **others: Any) -> Iterator[HostsJob]:
    with tempfile.TemporaryDirectory() as folder:
        job = HostsJob(Path(folder), HOSTS, kind=kind, steps=steps, leader=LEADER, within=net.host, **others)
        with job:
            yield job.start_all()


def chain(steps: int) -> dict[int, str]:
    values, value = {}, "0"
    for number in range(1, steps + 1):
        values[number] = value = chained(number, value)
    return values


def cut(net: Net, seed: int, seconds: float) -> dict[str, Any]:
    chance = random.Random(seed)
    host, step = chance.randrange(HOSTS), chance.randrange(12, 60)
    with job_on(net, "barrier", 200) as job:
        job.until("step", host, step=step)
        workers = [job.pid(index) for index in range(HOSTS)]
        net.cut(host, "down")
        began = time.time()
        ended = {}
        while len(ended) < HOSTS and time.time() - began < min(seconds, 20):
            for index, pid in enumerate(workers):
                if index not in ended and gone(pid, 0.01):
                    ended[index] = round(time.time() - began, 2)
        time.sleep(max(0.0, seconds - (time.time() - began)))
        net.cut(host, "up")
        healed = time.time()
        codes = job.wait(120)
        after = [note["unix_seconds"] for note in job.notes("step") if note["attempt"] > 1]
        late = [note for note in job.notes("step", attempt=1) if note["unix_seconds"] > began + 6]
        return {
            "host": host,
            "seconds": seconds,
            "workers_ended_seconds": ended,
            "recover_seconds": round(min(after) - healed, 2),
            "steps_of_old_workers": len(late),
            "exact": codes == [0] * HOSTS and job.values() == chain(200),
        }


def scan(net: Net, seed: int, seconds: float) -> dict[str, Any]:
    with job_on(net, "jax", 100_000) as job:
        job.until("step", 1, step=12)
        lines = net.run("h0", "ss", "-Hltn").splitlines()
        local = [line.split()[3] for line in lines]
        ports = ",".join(sorted({address.rpartition(":")[2] for address in local}))
        found = net.run("outside", sys.executable, "-c", LOOK, "10.78.0.1", ports).split()
        net.run("outside", "ip", "route", "add", "10.77.0.0/16", "via", "10.78.0.1")
        around = net.run("outside", sys.executable, "-c", LOOK, LEADER, ports).split()
        return {"listening": local, "open_from_outside": found, "open_by_a_route": around}


def intruder(net: Net, seed: int, seconds: float) -> dict[str, Any]:
    steps = 4000
    with job_on(net, "jax", steps) as job:
        job.until("step", 1, step=20)
        local = [row.split()[3] for row in net.run("h0", "ss", "-Hltn").splitlines()]
        began = time.time()
        said = {
            address: net.run("inside", "env", "JAX_PLATFORMS=cpu", sys.executable, "-c", INTRUDER, target)
            for address in local
            if (target := f"{LEADER}:{address.rpartition(':')[2]}")
        }
        codes = job.wait(200)
        starts = [start["unix_seconds"] for start in job.log("start")]
        return {
            "codes": codes,
            "attempts": len(starts),
            "restarted_after_seconds": round(starts[1] - began, 2) if len(starts) > 1 else None,
            "told": [cause["text"].splitlines()[0] for cause in job.log("cause")],
            "intruder": {address: text.strip().splitlines()[-1:] for address, text in said.items()},
            "finished": sorted(job.values()) == list(range(1, steps + 1)),
        }


if __name__ == "__main__":
    fault, trials = sys.argv[1], int(sys.argv[2])
    length = float(sys.argv[3]) if len(sys.argv) > 3 else 8.0
    for number in range(trials):
        with Net() as network:
            print(
                json.dumps({"fault": fault, "trial": number, **globals()[fault](network, number, length)}), flush=True
            )
