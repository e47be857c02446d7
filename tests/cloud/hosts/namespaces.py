"""Hosts as namespaces of this machine: the machines behind the fake cloud are real.

Each host has its own network, processes, host name and file tree (a copy-on-write view of this machine's). It runs its
own sshd with its own host key, asks its own metadata server, and runs the startup script of its metadata as root. When
the process that started it ends, the kernel ends every process of the host.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hosts.inside import Forwarder, TunnelProxy, listen_inside
from hosts.metadata import Metadata, MetadataServer, instance_metadata

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PROXY_PORT = 3128
START_SECONDS = 60.0
STOP_SECONDS = 30.0  # as long as the cloud waits between the signal and the end of a spot machine


# Agents ask for the state every second. The shell answers that in a hundredth of the time.
SYSTEMCTL = """#!/bin/sh
state=/run/units/$2.show
if [ "$1" = show ] && [ $# = 3 ] && [ -f "$state" ] && [ "${3#--property=}" != "$3" ]; then
  for wanted in $(echo "${3#--property=}" | tr , ' '); do
    while IFS== read -r name value; do [ "$name" = "$wanted" ] && echo "$name=$value"; done <"$state"
  done
  exit 0
fi
exec INTERPRETER -IS /usr/lib/test-systemctl.py "$@"
"""


class NamespaceMachines:
    """Starts hosts as namespaces.

    Args:
      folder: a folder for the files of the hosts; None: a temporary one, removed at the end.
      environment: variables of `/etc/default/forerun` on each host. Ports of this machine that they name as
        `127.0.0.1:PORT` can be reached from each host under the same address. `{host}` becomes the index of the host.
      files: other files of each host, such as the configuration of a package installer.
      programs: programs of each host: its path there, and the file that a link there names.
      shared: a folder of this machine that each host sees and may change, for a cache of packages.
      software: the folder for what the hosts install. In `shared`, its files can be hard links to the cache.
      proxy: let the hosts reach the network of this machine through an HTTP proxy on their port 3128.
    """

    def __init__(
        self,
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        programs: Mapping[str, str] | None = None,
        shared: str | None = None,
        software: str | None = None,
        proxy: bool = False,
        project: str = "test-project",
    ) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="forerun-hosts-") if folder is None else folder)
        self._environment, self._files = dict(environment or {}), dict(files or {})
        self._programs, self._shared, self._software = dict(programs or {}), shared, software
        self._proxy, self._project = proxy, project
        self._slices: dict[str, list[Host]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._network = Network()

    def start(self, slice_name: str, zone: str, hosts: int, metadata: Mapping[str, str], accelerator: str) -> None:
        with self._lock:
            numbers = [next(self._numbers) for _ in range(hosts)]
            addresses = [self._network.addresses(number) for number in numbers]
            started = [
                Host(
                    folder=self.folder / f"{slice_name}-{number}",
                    label=f"{self._network.bridge}{number}",
                    metadata=instance_metadata(
                        slice_name=slice_name,
                        zone=zone,
                        project=self._project,
                        index=index,
                        addresses=addresses,
                        attributes=metadata,
                        accelerator=accelerator,
                    ),
                )
                for index, number in enumerate(numbers)
            ]
            self._slices[slice_name] = started
        for index, host in enumerate(started):
            self._start(host, slice_name, index, addresses[index])
        for host in started:
            self._connect(host)

    def allow_api(self, port: int) -> None:
        """Let the hosts use the fake APIs on this port, with the credentials of their metadata server."""
        prefix = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
        self._environment[f"{prefix}TPU"] = f"http://127.0.0.1:{port}/"
        self._environment[f"{prefix}COMPUTE"] = f"http://127.0.0.1:{port}/compute/v1/"

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        return [host.addresses for host in self._slices.get(slice_name, [])]

    def host_keys(self, slice_name: str) -> list[list[str]]:
        found = []
        for host in self._slices.get(slice_name, []):
            keys = {name: key for name, key in host.metadata.guest.items() if name.startswith("hostkeys/")}
            found.append([f"{name.removeprefix('hostkeys/')} {key}" for name, key in keys.items()])
        return found

    def guest_attributes(self, slice_name: str) -> list[dict[str, str]]:
        return [dict(host.metadata.guest) for host in self._slices.get(slice_name, [])]

    def notice(self, slice_name: str) -> None:
        for host in self._slices.get(slice_name, []):
            host.metadata.set("instance/preempted", "TRUE")
            host.metadata.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")

    def stop(self, slice_name: str, *, kill: bool) -> None:
        with self._lock:
            stopped = self._slices.pop(slice_name, [])
        for host in stopped:
            if host.process is not None and not kill:
                os.kill(first_process(host.process.pid), signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        for host in stopped:
            host.end(0 if kill else max(0.0, end - time.monotonic()))

    def close(self) -> None:
        for name in list(self._slices):
            self.stop(name, kill=True)
        self._network.remove()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pid(self, slice_name: str, index: int) -> int:
        """Return the number, on this machine, of the first process of a host, for `nsenter --target`."""
        process = self._slices[slice_name][index].process
        assert process is not None
        return first_process(process.pid)

    def _start(self, host: Host, slice_name: str, index: int, addresses: tuple[str, str]) -> None:
        shutil.rmtree(host.folder, ignore_errors=True)
        host.folder.mkdir(parents=True)
        for name in ("first_process.py", "systemctl.py"):
            shutil.copyfile(HERE / name, host.folder / name)
        interpreter = os.path.realpath(sys.executable)
        systemctl = host.folder / "systemctl"
        systemctl.write_text(SYSTEMCTL.replace("INTERPRETER", interpreter))
        host.addresses = addresses
        description = {
            "name": f"{slice_name}-w-{index}"[:63],
            "external": addresses[0],
            "internal": addresses[1],
            "gateway": self._network.gateway,
            "environment": {name: value.replace("{host}", str(index)) for name, value in self._environment.items()},
            "files": self._files,
            "copies": {"/usr/bin/systemctl": str(systemctl), "/usr/lib/test-systemctl.py": str(HERE / "systemctl.py")},
            "links": self._programs,
            # A script, not a link: the interpreter finds its library beside its own file.
            "interpreter": [interpreter, f"/usr/local/bin/python{sys.version_info.major}.{sys.version_info.minor}"],
            # Nothing of the repository may help a host: all that it needs must come to it as on a real one.
            "hidden": [str(REPOSITORY)],
            "visible": [*_installation(interpreter), *([self._shared] if self._shared else [])],
            "software": f"{self._software}/{host.label}" if self._software else "",
        }
        (host.folder / "host.json").write_text(json.dumps(description))
        # The uptime of a machine begins with its start: the watch of the startup script counts it.
        uptime = int(time.clock_gettime(time.CLOCK_BOOTTIME))
        clocks = ("--time", f"--boottime=-{uptime}")
        with (host.folder / "console.log").open("ab") as console:
            host.process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL"),
                    *clocks,
                    *(interpreter, "-IS", str(host.folder / "first_process.py"), str(host.folder)),
                ],
                stdout=console,
                stderr=console,
                stdin=subprocess.PIPE,  # ends the host when this process ends
            )

    def _connect(self, host: Host) -> None:
        """Give the host its link, its metadata server and the ports of this machine that it may use."""
        assert host.process is not None
        namespace = f"/proc/{host.process.pid}/ns/net"
        until(lambda: os.stat(namespace).st_ino != os.stat("/proc/self/ns/net").st_ino, host)
        self._network.connect(host.label, host.process.pid)
        until((host.folder / "network").exists, host)
        listening = listen_inside(namespace, ("169.254.169.254", 80))
        host.servers.append(MetadataServer(listening, host.metadata))
        for port in ports_of(self._environment.values()):
            host.servers.append(Forwarder(listen_inside(namespace, ("127.0.0.1", port)), port))
        if self._proxy:
            host.servers.append(TunnelProxy(listen_inside(namespace, ("127.0.0.1", PROXY_PORT))))
        (host.folder / "metadata").touch()


@dataclass
class Host:
    folder: Path
    label: str
    metadata: Metadata
    addresses: tuple[str, str] = ("", "")
    process: subprocess.Popen[bytes] | None = None
    servers: list[MetadataServer | Forwarder | TunnelProxy] = field(default_factory=list)

    def end(self, seconds: float) -> None:
        """Wait for the host's own end, then kill it. Its files remain."""
        if self.process is not None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                # The kernel kills every process of the host with its first one, and `unshare` ends afterwards.
                os.kill(first_process(self.process.pid), signal.SIGKILL)
                self.process.wait()
            assert self.process.stdin is not None
            self.process.stdin.close()
        for server in self.servers:
            server.close()


def missing_for_hosts() -> str:
    """Return why this machine cannot have hosts as namespaces, or an empty text."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [
        name for name in ("sshd", "ssh-keygen", "ip", "unshare", "nsenter", "curl") if not shutil.which(name, path=path)
    ]
    if missing:
        return f"{missing[0]} is not installed"
    namespaces = ("--mount", "--pid", "--net", "--time")
    tried = subprocess.run(["unshare", *namespaces, "--fork", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Network:
    """A bridge with a subnet 10.A.B.0/24 that no other test uses."""

    def __init__(self) -> None:
        while True:
            first, second = random.SystemRandom().randrange(64, 250), random.SystemRandom().randrange(250)
            self.bridge, self.prefix = f"fr{first:02x}{second:02x}-", f"10.{first}.{second}"
            created = subprocess.run(["ip", "link", "add", self.bridge, "type", "bridge"], capture_output=True)
            if created.returncode == 0:
                break
            assert b"exists" in created.stderr, created.stderr.decode()
        self.gateway = f"{self.prefix}.1"
        ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def addresses(self, number: int) -> tuple[str, str]:
        """Return the external and the internal address of a host."""
        assert number < 120, "one network has addresses for 120 hosts"
        return f"{self.prefix}.{number + 130}", f"{self.prefix}.{number + 2}"

    def connect(self, label: str, pid: int) -> None:
        ip("link", "add", label, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", label, "master", self.bridge, "up")

    def remove(self) -> None:
        ip("link", "del", self.bridge)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def until(condition: object, host: Host) -> None:
    end = time.monotonic() + START_SECONDS
    while not condition():  # type: ignore[operator]
        console = host.folder / "console.log"
        assert host.process is not None
        assert host.process.poll() is None, f"a host ended at its start: {console.read_text()}"
        assert time.monotonic() < end, f"a host does not start: {console.read_text()}"
        time.sleep(0.01)


def first_process(pid: int) -> int:
    """Return the child of `unshare`."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def ports_of(values: Sequence[str] | object) -> list[int]:
    """Return the ports of this machine that variables name."""
    return sorted({int(port) for value in values for port in re.findall(r"//127\.0\.0\.1:(\d+)", value)})  # type: ignore[attr-defined]


def _installation(interpreter: str) -> list[str]:
    """Return the folder of an interpreter that is hidden otherwise, because it is in a home folder."""
    prefix = Path(interpreter).parent.parent
    return [str(prefix)] if prefix.is_relative_to("/root") or prefix.is_relative_to("/home") else []
