"""The HTTP server of the fake: the REST APIs below their own paths, and the control of tests below `/control/`.

python -P server.py OPTIONS      # OPTIONS is JSON; the first line of the output is the port
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fake.clock import http_date
from fake.compute_api import ComputeApi
from fake.faults import Dropped, Faults, malformed_content
from fake.machines import machines_named
from fake.project_api import ProjectApi
from fake.tpu_api import TpuApi
from fake.world import ApiFault, Delays, World

READY = "ready on port "


class FakeServer:
    """Routes requests. One lock serialises all of them: each API call is atomic, as in a database."""

    def __init__(self, options: dict[str, Any]) -> None:
        machines = machines_named(options.get("machines", "none"), options.get("machine_options", {}))
        self.world = World(machines, Delays(**options.get("delays", {})))
        self.world.settings.update(options.get("settings", {}))
        self.tpu = TpuApi(self.world)
        self.compute = ComputeApi(self.world)
        self.apis: list[Any] = [self.tpu, self.compute, ProjectApi(self.world)]
        self.faults = Faults()
        self.log: list[dict[str, Any]] = []

    def answer(self, method: str, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return the HTTP status and the content of an API call. Raise Dropped for an answer that is lost."""
        parts = urlsplit(url)
        path, query = unquote(parts.path).replace("//", "/"), query_of(parts.query)
        query.pop("alt", None)
        query.pop("prettyPrint", None)
        with self.world.lock:
            entry = {
                "method": method,
                "path": path,
                "query": query,
                "body": copy.deepcopy(body),
                "at": self.world.now(),
            }
            self.log.append(entry)
            self.world.settle()
            fault = self.faults.take(method, path, self.world.now())
        if fault is not None and fault.kind == "slow":
            time.sleep(fault.seconds)
        if fault is not None and fault.kind == "refuse":
            entry["status"] = 0
            raise Dropped
        if fault is not None and fault.kind == "error":
            entry["status"] = fault.http
            error = ApiFault(fault.http, fault.status, fault.message)
            return fault.http, json.dumps(error_json(path, error)).encode()
        with self.world.lock:
            status, found = self._call(method, path, query, body)
            if fault is not None and fault.kind == "duplicate":
                # The network delivered the request twice; the client sees the second answer.
                self.world.settle()
                status, found = self._call(method, path, query, body)
            entry["status"] = status
            content = json.dumps(found).encode()
        if fault is not None and fault.kind == "lost":
            raise Dropped
        if fault is not None and fault.kind == "malformed":
            return status, malformed_content(fault.body, found)
        return status, content

    def _call(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            for api in self.apis:
                found = api.answer(method, path, query, body)
                if found is not None:
                    return 200, found
        except ApiFault as error:
            return error.http, error_json(path, error)
        return 404, error_json(path, ApiFault(404, "NOT_FOUND", f"The fake has no method {method} {path}"))

    def control(self, action: str, values: dict[str, Any]) -> Any:
        world = self.world
        with world.lock:
            if action == "wait_idle":
                return None
            if action == "advance":
                world.advance(values["seconds"])
            elif action == "run_clock":
                world.clock.run(values["speed"])
            elif action == "now":
                return world.now()
            elif action == "preempt":
                world.settle()
                return world.preempt(values["name"], values["notice_seconds"])
            elif action == "capacity":
                world.set_capacity(values["zone"], values["slice"], values["count"])
            elif action == "quota":
                key = (values["zone"], values["generation"], values["spot"])
                if values["chips"] is None:
                    world.quota.pop(key, None)
                else:
                    world.quota[key] = values["chips"]
            elif action == "delays":
                for name, value in values.items():
                    setattr(world.delays, name, value)
            elif action == "settings":
                world.settings.update(values)
            elif action == "bill":
                world.settle()
                return world.bill()
            elif action == "rentals":
                world.settle()
                return [vars(one) | {"usd": one.usd(world.now())} for one in world.rentals]
            elif action == "resources":
                world.settle()
                return self.resources()
            elif action == "requests":
                return self.log
            elif action == "inject":
                self.faults.add(values)
            elif action == "fired":
                return self.faults.fired
            elif action == "clear_faults":
                self.faults.waiting.clear()
            else:
                raise KeyError(action)
            return None

    def resources(self) -> list[dict[str, Any]]:
        found = []
        for name, node in self.tpu.nodes.nodes.items():
            found.append({"kind": "node", "name": name.rsplit("/", 1)[1], "zone": name.split("/")[3], "resource": node})
        for name, one in self.tpu.queue.requests.items():
            place = {"name": name.rsplit("/", 1)[1], "zone": name.split("/")[3]}
            found.append({"kind": "queued resource", **place, "resource": one})
        for api in self.apis[1:]:
            found.extend(api.resources())
        return found


def query_of(text: str) -> dict[str, str]:
    """Return the parameters of a URL. Values of a repeated one are joined by commas."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def error_json(path: str, error: ApiFault) -> dict[str, Any]:
    """Return an error as the API writes it: both families have `error.code` and `error.message`."""
    if path.startswith("/compute/"):
        one = {"message": error.message, "domain": "global", "reason": error.reason or error.status}
        return {"error": {"code": error.http, "message": error.message, "errors": [one]}}
    details = list(error.details)
    if error.reason:
        details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.reason})
    content = {"code": error.http, "message": error.message, "status": error.status}
    return {"error": content | ({"details": details} if details else {})}


def handler_of(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one packet for the headers and the content

        def log_message(self, *_: Any) -> None:
            pass

        def date_time_string(self, timestamp: float | None = None) -> str:
            return http_date(server.world.clock.now() if timestamp is None else timestamp)

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length) if length else b""
            try:
                body = json.loads(text) if text.strip() else {}
                if self.path.startswith("/control/"):
                    value = server.control(self.path.removeprefix("/control/"), body)
                    status, content = 200, json.dumps({"value": value}).encode()
                else:
                    status, content = server.answer(self.command, self.path, body)
            except Dropped:
                self.close_connection = True
                return
            except json.JSONDecodeError as error:
                refusal = {"error": {"code": 400, "message": str(error), "status": "INVALID_ARGUMENT"}}
                status, content = 400, json.dumps(refusal).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _handle

    return Handler


class QuietServer(ThreadingHTTPServer):
    """Does not report clients that were killed in the middle of a request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def main(options: dict[str, Any]) -> None:
    server = FakeServer(options)

    def tick() -> None:
        while True:
            time.sleep(0.05)
            with server.world.lock:
                if server.world.clock.speed:
                    server.world.settle()

    threading.Thread(target=tick, daemon=True).start()
    http = QuietServer((options.get("address", "127.0.0.1"), options.get("port", 0)), handler_of(server))
    http.daemon_threads = True
    server.compute.store.base = f"http://{options.get('address', '127.0.0.1')}:{http.server_port}/compute/v1/"
    allow = getattr(server.world.machines, "allow_api", None)
    if allow is not None:
        allow(http.server_port)  # hosts have a network of their own
    print(f"{READY}{http.server_port}", flush=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test closes it, or ends in any way
    http.shutdown()
    stop = getattr(server.world.machines, "close", None)
    if stop is not None:
        stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
