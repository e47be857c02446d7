"""A server with the HTTP routes that the wandb client uses for a run: GraphQL, `file_stream` and uploads of files.

`runs` has what Weights & Biases would store. Lines of a stream are stored at the offset that the client sends, as on
the real server.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY, EVENTS, SUMMARY, LOG = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json", "output.log"
ENTITY = "someone"


@dataclass
class StoredRun:
    """What the server knows about a run."""

    name: str
    project: str
    display: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[int, str]] = field(default_factory=dict)  # lines of streams by offset
    uploads: dict[str, bytes] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    sessions: int = 0

    def lines(self, file: str) -> list[str]:
        """Return the lines of a stream in order."""
        return [line for _, line in sorted(self.files.get(file, {}).items())]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the history in order."""
        return [json.loads(line) for line in self.lines(HISTORY)]

    def about(self) -> dict[str, Any]:
        """Return the fields that GraphQL answers have."""
        owner = {"id": "owner", "name": ENTITY}
        return {
            "id": f"id-{self.name}",
            "name": self.name,
            "displayName": self.display,
            "description": None,
            "config": json.dumps(self.config),
            "wandbConfig": json.dumps(self.config.get("_wandb", {}).get("value", {})),  # the client reads its key `t`
            "summaryMetrics": (self.lines(SUMMARY) or ["{}"])[-1],
            "sweepName": None,
            "tags": [],
            "notes": None,
            "project": {"id": "project", "name": self.project, "entity": owner},
            "historyLineCount": len(self.lines(HISTORY)),
            "eventsLineCount": len(self.lines(EVENTS)),
            "logLineCount": len(self.lines(LOG)),
            "historyTail": json.dumps(self.lines(HISTORY)[-1:]),
            "eventsTail": json.dumps(self.lines(EVENTS)[-1:]),
        }


class WandbServer:
    """The model of the server. `down` makes it answer 500 to requests of the stream."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.runs: dict[str, StoredRun] = {}
        self.refused = 0
        self.down = False
        self.requests: list[str] = []
        self.arrived = threading.Condition()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on a free port of this machine, and yield the address."""
        server = _Server(("127.0.0.1", 0), type("Routes", (_Routes,), {"model": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield self.url
        finally:
            server.shutdown()
            server.server_close()

    def wait_for(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until a condition is true after a request."""
        with self.arrived:
            assert self.arrived.wait_for(true, seconds), "the condition did not become true"

    def graphql(self, query: str, values: dict[str, Any]) -> dict[str, Any]:
        """Answer a query."""
        name = query.split("(")[0].split("{")[0].split()[-1]
        self.requests.append(name)
        if name == "RunResumeStatus":
            run = self.runs.get(values["name"])
            entity = {"id": "owner", "name": ENTITY}
            return {"model": {"id": "m", "name": values["project"], "entity": entity, "bucket": run and run.about()}}
        if name == "UpsertBucket":
            inserted = values["name"] not in self.runs
            run = self.runs.setdefault(values["name"], StoredRun(values["name"], values["project"]))
            run.display = values.get("displayName") or run.display
            run.config |= json.loads(values.get("config") or "{}")
            run.sessions += 1
            return {"upsertBucket": {"bucket": run.about(), "inserted": inserted}}
        if name == "CreateRunFiles":
            to = f"{self.url}/storage/{values['run']}/"
            files = [{"name": file, "uploadUrl": to + file} for file in values["files"]]
            return {"createRunFiles": {"runID": f"id-{values['run']}", "uploadHeaders": [], "files": files}}
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if name == "Viewer":
            return {
                "viewer": {"id": "v", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}", "teams": None}
            }
        return {}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        """Store lines of a run."""
        run = self.runs[name]
        for file, chunk in (body.get("files") or {}).items():
            stored = run.files.setdefault(file, {})
            for number, line in enumerate(chunk["content"]):
                stored[chunk["offset"] + number] = line
        if body.get("complete"):
            run.exit_codes.append(body["exitcode"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore connections that a killed client closes."""


class _Routes(BaseHTTPRequestHandler):
    model: WandbServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        model = self.model
        wanted = "Basic " + base64.b64encode(f"api:{model.key}".encode()).decode()
        if self.headers["Authorization"] != wanted:
            model.refused += 1
            return self.answer(401, {"errors": [{"message": "invalid key"}]})
        with model.arrived:
            if self.path == "/graphql":
                given = json.loads(body)
                answer: dict[str, Any] = {"data": model.graphql(given["query"], given.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                if model.down:
                    return self.answer(500, {})
                model.stream(self.path.split("/")[-2], json.loads(body))
                answer = {}
            else:
                return self.answer(404, {})
            model.arrived.notify_all()
        self.answer(200, answer)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        _, _, name, file = self.path.split("/", 3)
        with self.model.arrived:
            self.model.runs[name].uploads[file] = body
            self.model.arrived.notify_all()
        self.answer(200, {})

    def do_GET(self) -> None:
        self.answer(200, {})

    def answer(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
