"""Real HTTP requests to the server of a run: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from error_assertions import assert_error
from recording_reporter import CallingReporter
from written_run import WrittenRun

from forerun.errors import UserError
from forerun.pages.render import script_digest
from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunStatus
from forerun.watch import web_server as server_module
from forerun.watch.run_reader import FolderReader
from forerun.watch.web_server import MAX_CONNECTIONS, LivePage, LiveServer, live_script, open_server, serve


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "runs")
    run.steps(1, 4)
    return run


@pytest.fixture
def server(run: WrittenRun) -> Iterator[LiveServer]:
    reader = FolderReader(run.path)
    reader.every_seconds = 0.0
    server = open_server(reader)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Answer:
    """The answer to one request."""

    def __init__(self, server: LiveServer, path: str, method: str = "GET", host: str | None = None) -> None:
        port = server.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
        connection.endheaders()
        found = connection.getresponse()
        self.code, self.headers, self.text = found.status, found.headers, found.read().decode()
        connection.close()


def test_the_page_has_the_curves_of_the_run(server: LiveServer) -> None:
    answer = Answer(server, f"/{server.token}/")
    assert (answer.code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "<title>Run short</title>" in answer.text
    assert 'class="lines' in answer.text
    assert live_script() in answer.text
    assert "http-equiv" not in answer.text, "a policy in the page would forbid its requests"


def test_headers_protect_the_page(server: LiveServer) -> None:
    headers = Answer(server, f"/{server.token}/").headers
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert f"'{script_digest(live_script())}'" in rules["script-src"].split()
    assert "unsafe" not in rules["script-src"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert [name for name in headers if name.lower().startswith("access-control")] == []


def test_a_poll_gets_the_new_content_of_a_run_that_advances(server: LiveServer, run: WrittenRun) -> None:
    path = f"/{server.token}/content"
    first = Answer(server, path)
    version = first.headers["X-Version"]
    assert Answer(server, f"{path}?version={version}").code == 204
    assert ">20</dd>" not in first.text
    run.steps(5, 20)
    run.write("summary.json", {"steps": 20})
    second = Answer(server, f"{path}?version={version}")
    assert second.code == 200
    assert second.headers["X-Version"] != version
    assert ">20</dd>" in second.text
    assert "finished" in second.text


@pytest.mark.parametrize(
    "path",
    ["/", "/content", "/wrong/", "/wrong/content", "/{token}x/", "/{cut}/", "/?token={token}", "/%C3%A9/"],
)
def test_without_the_token_nothing_is_sent(server: LiveServer, path: str) -> None:
    answer = Answer(server, path.format(token=server.token, cut=server.token[:-1]))
    assert answer.code == 403
    assert "short" not in answer.text
    assert server.token not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "[::1]", "0.0.0.0"])
def test_another_host_name_is_refused(server: LiveServer, host: str) -> None:
    assert Answer(server, f"/{server.token}/", host=host).code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:65535"])
def test_a_forwarded_port_may_differ(server: LiveServer, host: str) -> None:
    assert Answer(server, f"/{server.token}/", host=host).code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "BREW"])
def test_only_get_and_head(server: LiveServer, method: str) -> None:
    answer = Answer(server, f"/{server.token}/", method)
    assert (answer.code, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_head_has_no_body(server: LiveServer) -> None:
    answer = Answer(server, f"/{server.token}/", "HEAD")
    assert (answer.code, answer.text) == (200, "")
    assert int(answer.headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "name", ["job.yaml", "../job.yaml", "..%2f..%2fetc/passwd", "content/../job.yaml", "/etc/passwd", "content/"]
)
def test_no_file_can_be_read(server: LiveServer, name: str) -> None:
    assert Answer(server, f"/{server.token}/{name}").code == 404


def test_a_request_that_is_not_http_does_not_end_the_server(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
        connection.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        connection.recv(100)
    assert Answer(server, f"/{server.token}/").code == 200
    assert server.token not in "".join(capsys.readouterr())


@pytest.mark.parametrize("start", [b"", b"GET /"])
def test_idle_connections_do_not_block_a_request(server: LiveServer, start: bytes) -> None:
    """The server closes the oldest connections for new ones, and keeps at most `MAX_CONNECTIONS`."""
    idle = [socket.create_connection(("127.0.0.1", server.server_address[1])) for _ in range(2 * MAX_CONNECTIONS)]
    for connection in idle:
        with suppress(ConnectionError):  # the oldest ones may be closed already
            connection.sendall(start)
    assert Answer(server, f"/{server.token}/").code == 200  # the server accepts connections in their order
    for connection in idle[: MAX_CONNECTIONS + 1]:
        connection.settimeout(60)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""  # closed by the server
    for connection in idle[MAX_CONNECTIONS + 1 :]:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)  # still open
    for connection in idle:
        connection.close()


def test_a_client_that_sends_slowly_is_cut_off(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time for a timeout of the socket, but the complete request is not."""
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
        connection.sendall(b"GET /")
        assert Answer(server, f"/{server.token}/").code == 200  # after this, the slow connection is accepted
        monkeypatch.setattr(server_module, "CONNECTION_SECONDS", 0.0)  # its time is over now
        connection.settimeout(60)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_a_damaged_file_is_an_error_page_until_it_is_repaired(server: LiveServer, run: WrittenRun) -> None:
    path = f"/{server.token}/content"
    run.write("summary.json", {"steps": "many", "device": "<script>"})
    for _ in range(2):
        answer = Answer(server, path)
        assert (answer.code, answer.headers["Content-Type"]) == (500, "text/plain; charset=utf-8")
        assert "E-REPORT-003" in answer.text
        assert "<script>" not in answer.text
    run.write("summary.json", {"steps": 4})
    assert Answer(server, path).code == 200


def test_a_page_that_cannot_be_made_is_an_answer(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def newest() -> tuple[str, bytes]:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(server.page, "newest", newest)
    answer = Answer(server, f"/{server.token}/")
    assert answer.code == 500
    assert "ZeroDivisionError" in answer.text


def test_the_server_listens_on_this_machine_only_and_ends_with_its_port(run: WrittenRun) -> None:
    end, said = threading.Event(), list[str]()
    ready = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        ready.set()

    thread = threading.Thread(target=serve, args=(FolderReader(run.path), 0, end, CallingReporter(say)))
    thread.start()
    assert ready.wait(60)
    port = int(said[0].split("/")[2].partition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    end.set()
    thread.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_tokens_are_long_and_differ(run: WrittenRun) -> None:
    servers = [open_server(FolderReader(run.path)) for _ in range(2)]
    tokens = {server.token for server in servers}
    for server in servers:
        server.server_close()
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def test_a_used_port_is_an_error(run: WrittenRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(UserError) as caught:
            open_server(FolderReader(run.path), port)
    assert_error(caught.value, "E-WATCH-004", what=str(port))


def test_a_page_is_rendered_only_for_news(run: WrittenRun) -> None:
    rendered: list[int] = []
    reader = FolderReader(run.path)
    reader.every_seconds = 0.0

    def render(record: RunRecord, status: RunStatus) -> str:
        rendered.append(record.step)
        return "page"

    page = LivePage(reader, render=render)
    versions = [page.newest()[0], page.newest()[0]]
    run.steps(5, 5)
    versions.append(page.newest()[0])
    assert rendered == [4, 5]
    assert versions[0] == versions[1] != versions[2]


def test_a_run_that_cannot_be_read_keeps_its_page(run: WrittenRun) -> None:
    reader = FolderReader(run.path)
    reader.every_seconds = 0.0
    page = LivePage(reader)
    before = page.newest()
    run.path.rename(run.path.with_name("away"))
    assert page.newest() == before
