"""The fake cloud in a process of its own, and its control from a test."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from fake.faults import Fault
from fake.server import READY

PROJECT = "forerun-test"


class FakeCloud:
    """Serves the Cloud TPU and Compute Engine APIs until the block ends.

    with FakeCloud() as cloud:
        subprocess.run(["forerun", "ps"], env=os.environ | cloud.environment())
        cloud.advance(3600)
        assert cloud.bill() == {}

    Args:
      machines: what runs on the hosts: `none`, `namespaces`, or `module:Class` (`fake.machines.Machines`).
      machine_options: arguments of that class. They must be JSON.
      create_seconds: how long the creation of a slice takes, by the fake's clock. With 0, it is complete at the next
        request. The same holds for `delete_seconds`, and for `queue_seconds`, the shortest wait of a queued resource.
      speed: of the clock; 0: it stands still until `advance`.
      settings: `preempted_state`: the state that a preempted node shows. `runtimes`: more runtime versions.
      address: where the server listens. Machines in namespaces need an address that they can reach.
      log: the file for the output of the process; None: inherited.
    """

    def __init__(
        self,
        *,
        machines: str = "none",
        machine_options: Mapping[str, Any] | None = None,
        create_seconds: float = 0.0,
        delete_seconds: float = 0.0,
        queue_seconds: float = 0.0,
        speed: float = 0.0,
        settings: Mapping[str, Any] | None = None,
        address: str = "127.0.0.1",
        log: Path | None = None,
    ) -> None:
        self.address, self._speed, self._log = address, speed, log
        self._options = {
            "machines": machines,
            "machine_options": dict(machine_options or {}),
            "delays": {"create": create_seconds, "delete": delete_seconds, "queue": queue_seconds},
            "settings": dict(settings or {}),
            "address": address,
        }

    def __enter__(self) -> FakeCloud:
        command = [sys.executable, "-P", str(Path(__file__).with_name("server.py")), json.dumps(self._options)]
        self._errors = None if self._log is None else self._log.open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=dict(os.environ)
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().decode()
        if not ready.startswith(READY):
            self.__exit__(None, None, None)
            raise AssertionError(f"the fake cloud did not start: {ready!r}")
        self.port = int(ready.removeprefix(READY))
        if self._speed:
            self.run_clock(self._speed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process.stdout.close()
        if self._errors is not None:
            self._errors.close()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which forerun and gcloud use the fake."""
        prefix = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
        plain = ("TPU", "CLOUDRESOURCEMANAGER", "SERVICEUSAGE", "IAM", "CLOUDQUOTAS", "CLOUDBILLING")
        return {f"{prefix}{name}": f"{self.url}/" for name in plain} | {
            f"{prefix}COMPUTE": f"{self.url}/compute/v1/",
            f"{prefix}STORAGE": f"{self.url}/storage/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1",
            "CLOUDSDK_CORE_PROJECT": PROJECT,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
            "GOOGLE_CLOUD_PROJECT": PROJECT,
        }

    def now(self) -> float:
        """Return the time of the fake's clock, in seconds since 1970."""
        return float(self.control("now"))

    def advance(self, seconds: float) -> None:
        """Move the clock; everything that happens on the way (limits, ends of waits) happens."""
        self.control("advance", seconds=seconds)

    def run_clock(self, speed: float) -> None:
        """Let the clock run: 1 is real time, 60 is a minute per second, 0 stops it."""
        self.control("run_clock", speed=speed)

    def preempt(self, name: str, notice_seconds: float = 0.0) -> None:
        """Take the machines of a slice, after a notice in their metadata if `notice_seconds` is not 0."""
        assert self.control("preempt", name=name, notice_seconds=notice_seconds), f"no machines of {name} run"

    def set_capacity(self, zone: str, slice: str, count: int | None) -> None:
        """Set how many slices, such as `v6e-16`, the zone can run in total; None: any number (the default)."""
        self.control("capacity", zone=zone, slice=slice, count=count)

    def set_quota(self, zone: str, generation: str, chips: int | None, *, spot: bool = False) -> None:
        """Set how many chips of a generation, such as `v6e`, the project may have in a zone; None: any number."""
        self.control("quota", zone=zone, generation=generation, chips=chips, spot=spot)

    def set_delays(self, **seconds: float) -> None:
        """Change `create`, `delete` or `queue` (see the constructor)."""
        self.control("delays", **seconds)

    def set(self, **settings: Any) -> None:
        self.control("settings", **settings)

    def bill(self) -> dict[str, float]:
        """Return what each slice costs until now, in USD, by its name."""
        found: dict[str, float] = self.control("bill")
        return found

    def rentals(self) -> list[dict[str, Any]]:
        """Return the machines of every slice, also of those that have ended: times, price, cost."""
        found: list[dict[str, Any]] = self.control("rentals")
        return found

    def resources(self) -> list[dict[str, Any]]:
        """Return everything that exists, as {kind, name, zone, resource}."""
        found: list[dict[str, Any]] = self.control("resources")
        return found

    def requests(self) -> list[dict[str, Any]]:
        """Return all API requests so far, as {method, path, query, body, at, status}. Status 0: not answered."""
        found: list[dict[str, Any]] = self.control("requests")
        return found

    def inject(self, fault: Fault) -> None:
        """Let the next matching requests fail."""
        self.control("inject", **asdict(fault))

    def fired(self) -> set[str]:
        """Return the tags of the faults that have hit a request."""
        return set(self.control("fired"))

    def clear_faults(self) -> None:
        self.control("clear_faults")

    def control(self, action: str, **values: Any) -> Any:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=120)
        try:
            connection.request("POST", f"/control/{action}", json.dumps(values))
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer["value"]
