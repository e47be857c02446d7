"""Answers of the wrong shape, too large or without an end, from a real server: each counts as a failed call."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.google import credentials
from forerun.cloud.google import rest as rest_module
from forerun.cloud.google.rest import endpoints_from
from forerun.cloud.provider import CloudUnavailable, Provider, SliceState
from forerun.cloud.providers import google_rest
from forerun.cloud.tpu.tpu_provider import TpuProvider
from forerun.errors import UserError

NAME, ZONE = "forerun-a-1", "us-east5-b"
TPU, COMPUTE = (f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}" for name in ("TPU", "COMPUTE"))
ENVIRONMENT = {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1", "GOOGLE_CLOUD_PROJECT": "p"}
PAGE_KEYS = ("nodes", "queuedResources", "operations", "items", "guestAttributes", "managedInstances")


def pages_of(value: Any) -> dict[str, Any]:
    """Return an answer that has the same value wherever forerun expects a list."""
    return {key: value for key in PAGE_KEYS}


WRONG: dict[str, bytes | dict[str, Any] | list[Any] | str | None] = {
    "html": b"<html>captive portal</html>",
    "cut": b'{"nodes": [',
    "deep": b"[" * 100_000,
    "list": [],
    "null": None,
    "string": "x",
    "lists as strings": {**pages_of("x"), "name": 5},
    "lists of null": {**pages_of([None]), "items": {"zones/a": {"instances": [None]}}, "name": ["a"]},
    "empty resources": {**pages_of([{}]), "items": {"zones/a": {"instances": [{}]}}},
    "numbers": {**pages_of([{"name": 5, "state": 7}]), "name": 5, "state": 7, "status": 7, "labels": []},
    "labels of numbers": {"name": "n", **pages_of([{"name": "n", "labels": {"forerun-run": 1}}]), "labels": {"a": 1}},
}


class Answers(http.server.BaseHTTPRequestHandler):
    """Sends the body and the status that its server has."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.answer(self)  # type: ignore[attr-defined]

    do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


class AnswerServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests = 0
        self.status, self.body, self.headers = 200, b"{}", dict[str, str]()
        self.answer: Callable[[Answers], None] = self.send

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close their connection."""

    def send(self, handler: Answers) -> None:
        self.requests += 1
        handler.send_response(self.status)
        for name, value in {**self.headers, "Content-Length": str(len(self.body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(self.body)


@pytest.fixture(autouse=True)
def _two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_module, "TRIES", 2)


@pytest.fixture
def server() -> Iterator[AnswerServer]:
    with AnswerServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(params=[TpuProvider, ComputeProvider], ids=["tpu", "compute"])
def provider(request: pytest.FixtureRequest, server: AnswerServer) -> Provider:
    rest = google_rest(environment={**ENVIRONMENT, TPU: server.address, COMPUTE: server.address})
    rest.sleep = lambda seconds: None
    provider: Provider = request.param(rest)
    return provider


def calls_of(provider: Provider) -> dict[str, Callable[[], Any]]:
    return {
        "list": provider.list,
        "status": lambda: provider.status(NAME, ZONE),
        "addresses": lambda: provider.addresses(NAME, ZONE),
        "delete": lambda: provider.delete(NAME, ZONE),
        "host keys": lambda: provider.host_keys(NAME, ZONE),
    }


def outcome(call: Callable[[], Any]) -> str:
    """Return the class of the error of a call, or its result."""
    try:
        return f"returns {call()}"
    except (CloudUnavailable, UserError) as error:
        return type(error).__name__


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_of_the_wrong_shape_is_a_failed_call(wrong: str, provider: Provider, server: AnswerServer) -> None:
    content = WRONG[wrong]
    server.body = content if isinstance(content, bytes) else json.dumps(content).encode()
    calls = calls_of(provider)
    assert {name: outcome(call) for name, call in calls.items()} == dict.fromkeys(calls, "CloudUnavailable")
    assert provider.now() > 1.7e9  # the clock needs the header only


@pytest.mark.parametrize("error", ["bad", [1], {"details": 5, "errors": "x"}, {"code": "x", "message": [1]}, None])
@pytest.mark.parametrize("status", [302, 400, 409, 418])
def test_a_refusal_of_the_wrong_shape_is_a_failed_call(
    status: int, error: Any, provider: Provider, server: AnswerServer
) -> None:
    server.status, server.body = status, json.dumps({"error": error}).encode()
    server.headers = {"Location": f"{server.address}/elsewhere"}
    for name, call in calls_of(provider).items():
        if name == "host keys" and status != 302:
            continue  # a refusal means that the hosts have not reported keys yet
        assert outcome(call) == "CloudUnavailable", name


def test_an_operation_with_an_error_of_the_wrong_shape_is_a_failed_call(
    provider: Provider, server: AnswerServer
) -> None:
    server.body = b'{"name": "n", "error": "bad", "status": "DONE", "done": true}'
    assert outcome(lambda: provider.delete(NAME, ZONE)) == "CloudUnavailable"


@pytest.mark.parametrize("tokens", ["one", "many"])
def test_a_list_without_an_end_is_a_failed_call(
    tokens: str, provider: Provider, server: AnswerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_module, "MOST_PAGES", 20)

    def page(handler: Answers) -> None:
        token = "again" if tokens == "one" else f"page {server.requests}"
        server.body = json.dumps({"nextPageToken": token}).encode()
        server.send(handler)

    server.answer = page
    with pytest.raises(CloudUnavailable, match=r"nodes|instances"):
        provider.list()
    assert server.requests == (2 if tokens == "one" else 21)


def test_an_answer_that_is_too_large_is_a_failed_call(
    provider: Provider, server: AnswerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(credentials, "CHUNK_BYTES", 1 << 16)
    server.body = b'{"name": "' + b"x" * (2 << 20) + b'"}'
    with pytest.raises(CloudUnavailable, match="MiB"):
        provider.list()


def test_an_answer_that_drips_is_a_failed_call(
    provider: Provider, server: AnswerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(rest_module, "TRIES", 1)
    is_over = threading.Event()

    def drip(handler: Answers) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        try:
            while not is_over.wait(0.01):
                handler.wfile.write(b" ")
        except OSError:
            pass  # the client has closed the connection

    server.answer = drip
    try:
        with pytest.raises(CloudUnavailable):
            provider.list()
    finally:
        is_over.set()


@pytest.mark.parametrize("name", ["../victim", "a?x=", "a/../../instances/victim", "a#", "a%2f", "a b"])
def test_a_forged_name_reaches_no_other_resource(name: str, provider: Provider, server: AnswerServer) -> None:
    for zone, resource in ((ZONE, name), (name, NAME)):
        with pytest.raises(CloudUnavailable):
            provider.delete(resource, zone)
    assert server.requests == 0


def test_a_date_before_clouds_does_not_set_the_clock(provider: Provider, server: AnswerServer) -> None:
    def old(handler: Answers) -> None:
        handler.send_response_only(200)
        handler.send_header("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"{}")

    server.answer = old
    with pytest.raises(CloudUnavailable):
        provider.now()


def test_a_compressed_answer_in_small_parts_is_read(server: AnswerServer) -> None:
    nodes = [{"name": f"projects/p/locations/{ZONE}/nodes/n{index}", "labels": {}} for index in range(2000)]
    body = gzip.compress(json.dumps({"nodes": nodes}).encode())

    def parts(handler: Answers) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(body), 500):
            part = body[start : start + 500]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")

    server.answer = parts
    session, _ = credentials.google_session(ENVIRONMENT, endpoints_from(ENVIRONMENT | {TPU: server.address}))
    assert session.request("GET", server.address).json() == {"nodes": nodes}


def test_valid_empty_lists_are_no_failure(provider: Provider, server: AnswerServer) -> None:
    started = time.time()
    assert list(provider.list()) == []
    server.status, server.body = 404, b'{"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}}'
    assert provider.status(NAME, ZONE).state is SliceState.ABSENT
    assert provider.now() > started - 5
