"""Redirects between real servers on 127.0.0.1 and 127.0.0.2, for each http client that forerun uses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forerun import redirects
from forerun.cloud.google.credentials import GoogleSession
from forerun.data.source import files
from forerun.errors import UserError
from forerun.hardware import maintenance_notice
from forerun.hub.repository import guard_client
from forerun.redirects import check_redirect, is_public
from forerun.track.backends.mlflow import _OPENER

BODY = b'{"text": "internal"}\n' * 50


class Server(ThreadingHTTPServer):
    """A server whose paths that begin with /to redirect to `target`. `requests` has all requests."""

    target = ""

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.url = f"http://{host}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: object) -> None: ...

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        if self.path.startswith(("/to", "/api")) and self.server.target:
            self.send_response(302)
            self.send_header("Location", self.server.target)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = 0, len(BODY) - 1
        if asked := self.headers["Range"]:
            first, last = (
                int(text) if text else end for text, end in zip(asked[6:].split("-"), (0, last), strict=True)
            )
        content = BODY[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(BODY)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_GET


@dataclass
class Pair:
    first: Server = field(default_factory=lambda: Server("127.0.0.1"))
    second: Server = field(default_factory=lambda: Server("127.0.0.2"))


@pytest.fixture
def servers() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for server in (pair.first, pair.second):
        server.shutdown()
        server.server_close()


def content(address: str) -> bytes:
    with files.find(address)[0].open() as stream:
        return stream.read()


@pytest.mark.parametrize("target", ["SECOND/a.jsonl", "http://169.254.169.254/a.jsonl", "https://127.0.0.2:1/a.jsonl"])
def test_data_is_not_read_from_another_address(servers: Pair, target: str) -> None:
    servers.first.target = target.replace("SECOND", servers.second.url)
    with pytest.raises(UserError) as error:
        files.find(f"{servers.first.url}/to.jsonl")
    assert error.value.code == "E-DATA-222"
    assert servers.second.requests == []
    assert servers.first.requests != []


def test_data_is_read_from_the_same_host(servers: Pair) -> None:
    servers.first.target = "/data.jsonl"
    assert content(f"{servers.first.url}/to.jsonl") == BODY
    other = Server("127.0.0.1")
    servers.first.target = f"{other.url}/data.jsonl"
    assert content(f"{servers.first.url}/to2.jsonl") == BODY
    assert {path for path, _ in other.requests} == {"/data.jsonl"}
    other.shutdown()
    other.server_close()


def test_a_name_that_resolves_to_a_private_address_is_refused(servers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, {"rebound.example": ["127.0.0.2"]})
    servers.first.target = f"https://rebound.example:{servers.second.server_address[1]}/a.jsonl"
    with pytest.raises(UserError) as error:
        files.find(f"{servers.first.url}/to3.jsonl")
    assert error.value.code == "E-DATA-222"
    assert servers.second.requests == []


def test_the_address_of_the_connection_is_checked(servers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when the redirect is checked may have another address when the client connects."""
    resolve(monkeypatch, {"rebound.example": ["127.0.0.2"]})
    monkeypatch.setattr(redirects, "_resolved", lambda host: ["93.184.215.14"])
    servers.first.target = f"https://rebound.example:{servers.second.server_address[1]}/a.jsonl"
    with pytest.raises(UserError) as error:
        files.find(f"{servers.first.url}/to4.jsonl")
    assert error.value.code == "E-DATA-222"
    assert "127.0.0.2" in error.value.why


def resolve(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    real = socket.getaddrinfo

    def resolved(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host not in names:
            return real(host, port, *more, **named)
        return [entry for address in names[host] for entry in real(address, port, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_the_hub_client_follows_no_redirect_to_another_address(servers: Pair) -> None:
    from huggingface_hub import get_session

    guard_client()
    guard_client()
    client = get_session()
    assert len(client.event_hooks["response"]) == 1
    for target in (f"{servers.second.url}/x", "http://169.254.169.254/x", "https://127.0.0.2:1/x"):
        servers.first.target = target
        for follow in (True, False):  # the hub's library opens some locations itself
            with pytest.raises(UserError) as error:
                client.get(f"{servers.first.url}/to", follow_redirects=follow)
            assert error.value.code == "E-DATA-222"
    assert servers.second.requests == []
    servers.first.target = "/x"
    assert client.get(f"{servers.first.url}/to").content == BODY


def test_the_address_of_the_hub_clients_connection_is_checked(servers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_session

    guard_client()
    monkeypatch.setattr(redirects, "_resolved", lambda host: ["93.184.215.14"])
    resolve(monkeypatch, {"rebound.example": ["127.0.0.2"]})
    servers.first.target = "https://rebound.example/x"
    client = get_session()
    client.get(f"{servers.first.url}/to", follow_redirects=False)
    # The test has no certificate of that name. The same host answers by http here.
    with pytest.raises(UserError) as error:
        client.get(f"http://rebound.example:{servers.second.server_address[1]}/x")
    assert error.value.code == "E-DATA-222"


def test_a_download_from_the_hub_reports_the_refusal(servers: Pair) -> None:
    code = (
        "from forerun.hub.repository import Repository\nfrom forerun.errors import UserError\n"
        "try: Repository('a/b').listing(None)\nexcept UserError as error: print(error.code)"
    )
    servers.first.target = f"{servers.second.url}/x"
    environment = os.environ | {"HF_ENDPOINT": servers.first.url}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "E-DATA-222\n"
    assert servers.second.requests == []


def test_requests_to_google_follow_no_redirect(servers: Pair) -> None:
    from google.auth.credentials import AnonymousCredentials

    session = GoogleSession(AnonymousCredentials())
    for target in (f"{servers.second.url}/x", "/x"):
        servers.first.target = target
        answer = session.request("GET", f"{servers.first.url}/to")
        assert 300 <= answer.status_code < 400, "the caller gets the redirect itself"
    assert servers.second.requests == []
    assert [path for path, _ in servers.first.requests] == ["/to", "/to"]
    session.close()


def test_the_trackers_credentials_stay_on_their_server(servers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.first.target = f"{servers.second.url}/x"
    request = urllib.request.Request(f"{servers.first.url}/to", headers={"Authorization": "Bearer x"})
    with pytest.raises(UserError) as error:
        _OPENER.open(request)
    assert error.value.code == "E-DATA-222"
    monkeypatch.setattr(redirects, "check_redirect", lambda source, target: None)
    _OPENER.open(request).close()
    assert servers.second.requests == [("/x", None)]


def test_the_metadata_server_cannot_redirect(servers: Pair) -> None:
    servers.first.target = f"{servers.second.url}/x"
    opened = maintenance_notice.read(f"{servers.first.url}/to?", "x")
    assert opened is None
    assert servers.second.requests == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("https://a.example/x", "http://a.example/x"),
        ("https://a.example/x", "http://127.0.0.1/x"),
        ("https://a.example/x", "https://127.0.0.1/x"),
        ("https://a.example/x", "https://10.0.0.1/x"),
        ("https://a.example/x", "https://192.168.1.1/x"),
        ("https://a.example/x", "https://169.254.169.254/x"),
        ("https://a.example/x", "https://[fe80::1]/x"),
        ("https://a.example/x", "https://[fd00:ec2::254]/x"),
        ("https://a.example/x", "https://[::ffff:169.254.169.254]/x"),
        ("https://a.example/x", "https://[64:ff9b::a9fe:a9fe]/x"),
        ("https://a.example/x", "https://2852039166/x"),  # 169.254.169.254 as one number
        ("https://a.example/x", "https://0x7f.1/x"),
        ("https://a.example/x", "https://localhost/x"),
        ("https://a.example/x", "file:///etc/passwd"),
        ("https://a.example/x", "ftp://a.example/x"),
        ("https://a.example/x", "https:///x"),
        ("https://a.example/x", "https://b.example:bad/x"),
        ("https://a.example/x", "https://[b/x"),
        ("http://127.0.0.1:1/x", "http://127.0.0.2:1/x"),
        ("http://127.0.0.1:1/x", "http://localhost:1/x"),
        ("http://127.0.0.1:1/x", "http://127.0.0.1.example/x"),
    ],
)
def test_refused_redirects(source: str, target: str) -> None:
    with pytest.raises(UserError) as error:
        check_redirect(source, target)
    assert error.value.code == "E-DATA-222"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("https://a.example/x", "https://a.example/y?q=1"),
        ("https://a.example/x", "https://A.example:443/y"),
        ("https://a.example/x", "https://93.184.215.14/y"),
        ("https://a.example/x", "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/y"),
        ("http://a.example/x", "https://a.example/x"),
        ("http://127.0.0.1:1/x", "http://127.0.0.1:2/y"),
        ("http://localhost:1/x", "http://localhost:2/y"),
        ("http://10.0.0.1:1/x", "http://10.0.0.1:1/y"),  # HF_ENDPOINT of a local network
    ],
)
def test_followed_redirects(source: str, target: str) -> None:
    check_redirect(source, target)


@pytest.mark.parametrize("address", ["100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "::", "ff02::1", "2002:7f00:1::"])
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
