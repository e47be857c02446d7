"""A server that speaks the routes of MLflow that we use, and that misbehaves on command.

`metrics` holds what MLflow's store would: one entry per (run, key, timestamp, value, step), in the order of arrival.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SLOW_SECONDS = 0.1


class MlflowServer:
    """Modes: `""` well; `500`; `hang`; `slow`; `lost` does what it is told and loses every second answer; `close`."""

    def __init__(self, mode: str = "") -> None:
        self.mode = mode
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.metrics: dict[tuple[Any, ...], None] = {}
        self.repeated = 0
        self.authorizations: set[str | None] = set()
        self._lock, self._turn = threading.Lock(), itertools.count()
        self.port = 0

    @contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None: ...

        server = Server(("127.0.0.1", port), type("Handler", (Handler,), {"model": self}))
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self.mode = "close"
            server.shutdown()
            server.server_close()

    def rows(self) -> list[tuple[str, int, float]]:
        """(key, step, value) in the order of arrival."""
        with self._lock:
            return [(key, step, value) for _, key, _, value, step in self.metrics]

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if route == "experiments/get-by-name":
                found = self.experiments.get(body["experiment_name"])
                return (200, {"experiment": {"experiment_id": found}}) if found else (404, {})
            if route == "experiments/create":
                self.experiments[body["name"]] = str(len(self.experiments) + 1)
                return 200, {"experiment_id": self.experiments[body["name"]]}
            if route == "runs/search":
                token = body["filter"].split("'")[1]
                return 200, {"runs": [self.about(run) for run, tags in self.runs.items() if tags["token"] == token]}
            if route == "runs/create":
                run = f"run{len(self.runs)}"
                self.runs[run] = {"token": body["tags"][0]["value"], "status": "RUNNING", "params": {}}
                return 200, {"run": self.about(run)}
            run = body["run_id"]
            if route == "runs/update":
                self.runs[run]["status"] = body["status"]
                return 200, {}
            assert route == "runs/log-batch", route
            self.runs[run]["params"] |= {param["key"]: param["value"] for param in body.get("params", ())}
            for metric in body.get("metrics", ()):
                entry = (run, metric["key"], metric["timestamp"], metric["value"], metric["step"])
                self.repeated += entry in self.metrics
                self.metrics[entry] = None
            return 200, {}

    def about(self, run: str) -> dict[str, Any]:
        latest: dict[str, int] = {}
        for name, key, _, _, step in self.metrics:
            if name == run:
                latest[key] = max(step, latest.get(key, 0))
        metrics = [{"key": key, "step": step} for key, step in latest.items()]
        params = [{"key": key, "value": value} for key, value in self.runs[run]["params"].items()]
        return {"info": {"run_id": run}, "data": {"metrics": metrics, "params": params}}

    def loses(self) -> bool:
        return self.mode == "lost" and next(self._turn) % 2 == 0


class Handler(BaseHTTPRequestHandler):
    model: MlflowServer

    def log_message(self, *_: object) -> None: ...

    def relay(self) -> None:
        model = self.model
        model.authorizations.add(self.headers["Authorization"])
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        split = urlsplit(self.path)
        given = json.loads(body) if body else {key: value[0] for key, value in parse_qs(split.query).items()}
        while model.mode == "hang":
            time.sleep(0.02)
        if model.mode == "slow":
            time.sleep(SLOW_SECONDS)
        if model.mode == "close":
            return self.connection.shutdown(socket.SHUT_RDWR)
        code, content = (
            (500, {}) if model.mode == "500" else model.answer(split.path.removeprefix("/api/2.0/mlflow/"), given)
        )
        if model.loses():
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    do_GET = do_POST = relay
