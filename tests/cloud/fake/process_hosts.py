"""Hosts as processes, for campaigns of faults: the real agent, and a training that takes no computing time.

Each host is one session of processes with its own folder as `/`: a first process in place of systemd, the real agent
(`forerun.cloud.host`) and a trainer. All are forked from one process that has imported forerun before, so a host
starts within milliseconds. `FakeCloud(machines="fake.process_hosts:ProcessMachines", machine_options={...})`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA"


class MetadataServer:
    """The notices of one slice."""

    def __init__(self) -> None:
        self.preempted = False
        own = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                values = {"preempted": "TRUE" if own.preempted else "FALSE", "maintenance-event": "NONE"}
                value = values.get(self.path.rsplit("/", 1)[-1])
                self.send_response(404 if value is None else 200)
                self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the agent was killed
                    self.wfile.write((value or "").encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class ProcessMachines:
    """The machines of the fake cloud.

    Args:
      folder: has a folder for each slice, with one for each host.
      speed: of the fake's clock; all waits of the hosts are that much shorter.
      trainer: settings of the trainer: `step_seconds`, `save_every`, `total_steps`, `folder` (in place of the bucket).
      environment: of the agents, such as the addresses of the fake's own APIs.
    """

    def __init__(self, folder: str, speed: float, trainer: dict[str, Any], environment: dict[str, str]) -> None:
        self.folder, self.speed, self.trainer, self.environment = Path(folder), speed, trainer, environment
        self._slices: dict[str, tuple[int, MetadataServer]] = {}
        self._lock = threading.Lock()
        command = [sys.executable, "-P", str(Path(__file__).with_name("process_host.py"))]
        self._source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._source.stdout is not None
        assert self._source.stdout.readline() == b"ready\n"

    def allow_api(self, port: int) -> None:
        """Tell the hosts where the fake's APIs are."""
        base = f"http://127.0.0.1:{port}/"
        own = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": base}
        own |= {"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{base}compute/v1/"}
        self.environment = own | self.environment

    def start(self, slice_name: str, zone: str, hosts: int, metadata: Mapping[str, str], accelerator: str) -> None:
        metadata_server = MetadataServer()
        with self._lock:
            self._slices[slice_name] = (hosts, metadata_server)
        place = f"127.0.0.1:{metadata_server.http.server_port}"
        for host in range(hosts):
            root = self.folder / slice_name / f"host{host}"
            root.mkdir(parents=True)
            environment = self.environment | {"GCE_METADATA_HOST": place}
            wanted = {"root": str(root), "host": host, "speed": self.speed, "trainer": self.trainer}
            self._send(wanted | {"environment": environment})
            wait_for(root / "pid")

    def _send(self, wanted: Mapping[str, Any]) -> None:
        with self._lock:
            assert self._source.stdin is not None
            self._source.stdin.write(json.dumps(wanted).encode() + b"\n")
            self._source.stdin.flush()

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        count = self._slices[slice_name][0] if slice_name in self._slices else 0
        return [(f"127.0.1.{host + 1}", f"127.0.1.{host + 1}") for host in range(count)]

    def host_keys(self, slice_name: str) -> list[list[str]]:
        return [[f"{KEY}{host}"] for host, _ in enumerate(self.addresses(slice_name))]

    def notice(self, slice_name: str) -> None:
        if slice_name in self._slices:
            hosts, server = self._slices[slice_name]
            server.preempted = True
            for host in range(hosts):
                (self.folder / slice_name / f"host{host}" / "notice").touch()

    def stop(self, slice_name: str, *, kill: bool) -> None:
        found = self._slices.pop(slice_name, None)
        if found is None:
            return
        for host in range(found[0]):
            kill_host(self.folder / slice_name / f"host{host}")
        found[1].close()

    def close(self) -> None:
        for name in list(self._slices):
            self.stop(name, kill=True)
        assert self._source.stdin is not None
        assert self._source.stdout is not None
        self._source.stdin.close()
        self._source.wait(30)
        self._source.stdout.close()


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{file} does not appear")
        time.sleep(0.01)


def kill_host(root: Path) -> bool:
    """Kill all processes of a host, as a power failure does. Return whether it was running."""
    try:
        session = int((root / "pid").read_text())
    except (OSError, ValueError):
        return False
    alive = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
        alive = True
    (root / "dead").touch()
    return alive


def kill_process(root: Path, name: str) -> bool:
    """Kill one process of a host: `agent` or `trainer`. Return whether it was running."""
    try:
        os.kill(int((root / f"{name}.pid").read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        return False
    return True
