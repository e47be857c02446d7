"""The proxy that injects faults: each kind is what it says, counted, and followed by a read without fault."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from faulty_proxy import KINDS, FaultyProxy, object_of

BODY = bytes(range(256)) * 8
NAME = "tokens/k/unit-00000-of-00001/train.tokens"
PATH = f"/books/{NAME}"


class Emulator(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.send_header("x-goog-hash", "crc32c=AAAAAA==")
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Emulator)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def got(proxy: FaultyProxy, path: str = PATH) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(proxy.address.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("x-goog-hash")
    finally:
        connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_injected_once_and_counted(target: str, kind: str) -> None:
    with FaultyProxy(target, every=1, kinds=(kind,), slow_seconds=0.05) as proxy:
        if kind == "reset":
            with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                got(proxy)
        elif kind == "cut":
            with pytest.raises(http.client.IncompleteRead) as found:
                got(proxy)
            assert found.value.partial == BODY[: len(BODY) // 2]
        else:
            status, body, checksum = got(proxy)
            wanted = {"refuse": b"", "short": BODY[: len(BODY) // 2]}.get(kind, BODY)
            assert status == (503 if kind == "refuse" else 200)
            if kind == "flip":
                assert sum((a ^ b).bit_count() for a, b in zip(body, BODY, strict=True)) == 1
                assert checksum is None
            else:
                assert body == wanted
        assert proxy.injected() == {kind: 1}
        assert proxy.faults[0].object == NAME
        proxy.every = 0
        proxy._due = 0
        assert got(proxy)[:2] == (200, BODY)
        assert proxy.reads == 2


def test_one_read_in_four_has_a_fault_and_no_object_two_in_a_row(target: str) -> None:
    with FaultyProxy(target, every=4, kinds=("refuse",)) as proxy:
        seen = [got(proxy)[0] for _ in range(12)]
        assert seen == [200, 200, 200, 503] * 3
        assert got(proxy, "/books/tokens/k/index.json")[0] == 200
    assert (proxy.requests, proxy.reads) == (13, 12)
    with FaultyProxy(target, every=1, kinds=("refuse",)) as proxy:
        assert [got(proxy)[0] for _ in range(4)] == [503, 200, 503, 200]


def test_objects_are_found_in_paths_of_both_services() -> None:
    assert object_of("/books/a%20b/train.tokens?x-id=GetObject") == "a b/train.tokens"
    assert object_of("/storage/v1/b/books/o/a%2Ftrain.tokens?alt=media&generation=1") == "a/train.tokens"
    assert object_of("/storage/v1/b/books/o/a%2Ftrain.tokens") == ""
    assert object_of("/storage/v1/b/books/o?prefix=a") == ""
