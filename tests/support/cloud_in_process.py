"""The fake cloud without HTTP: a session of `forerun.cloud.google.rest.Rest` that calls the fake directly."""

from __future__ import annotations

import json as json_module
from typing import Any
from urllib.parse import urlencode

from fake.clock import http_date
from fake.faults import Dropped, Fault
from fake.server import FakeServer

from forerun.cloud.google.rest import Endpoints, Params, Rest

PROJECT = "forerun-test"
BASE = "http://fake"


class Reply:
    def __init__(self, status: int, content: Any, date: str) -> None:
        self.status_code, self.headers, self._content = status, {"Date": date}, content

    def json(self) -> Any:
        return self._content


class CloudInProcess:
    """Owns a fake cloud. `rest` sends requests to it; a pause of a request moves the fake's clock by `tick_seconds`."""

    def __init__(self, *, tick_seconds: float = 0.0, **options: Any) -> None:
        self.server = FakeServer(options)
        self.server.compute.store.base = f"{BASE}/compute/v1/"
        self.world = self.server.world
        self.tick_seconds = tick_seconds
        bases = {"tpu": f"{BASE}/", "compute": f"{BASE}/compute/v1/"}
        self.rest = Rest(
            PROJECT,
            self,
            Endpoints(bases),
            clock_api="compute",
            sleep=self._sleep,
            elapsed=lambda: 0.0,
            jitter=lambda: 0.0,
        )

    def request(
        self, method: str, url: str, *, json: Any = None, params: Params | None = None, timeout: Any = None
    ) -> Reply:
        del timeout
        path = url.removeprefix(BASE) + (f"?{urlencode(params)}" if params else "")
        try:
            status, content = self.server.answer(method, path, json_module.loads(json_module.dumps(json or {})))
        except Dropped:
            raise ConnectionError("the fake dropped the connection") from None
        return Reply(status, json_module.loads(content), http_date(self.world.clock.now()))

    def inject(self, fault: Fault) -> None:
        self.server.control("inject", vars(fault))

    def control(self, action: str, **values: Any) -> Any:
        return self.server.control(action, values)

    def names(self) -> set[tuple[str, str]]:
        """Return (kind, name) of everything that exists."""
        return {(one["kind"], one["name"]) for one in self.control("resources")}

    def _sleep(self, seconds: float) -> None:
        del seconds
        if self.tick_seconds:
            self.world.advance(self.tick_seconds)
