"""Secrets in URLs: they are rejected or used, and are in nothing that a command writes, prints or sends."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")  # of the extra `https`
QUERY, PASSWORD, TOKEN, NETRC = "canary-query-5e1f", "canary-password-77aa", "canary-token-90bc", "canary-netrc-31d2"
CANARIES = [text.encode() for text in (QUERY, PASSWORD, TOKEN, NETRC)]
ROWS = "".join(json.dumps({"text": f"row {n} of some text to learn from " * 8}) + "\n" for n in range(60))
TRACKER = """
import json

class Recorder:
    def begin(self, run):
        (run.folder / "sent.json").write_text(json.dumps({key: str(value) for key, value in run.job.items()}))

    def send(self, rows):
        pass
"""


class Site:
    """A web server: /rows.jsonl for all, /private/rows.jsonl for those who log in, and nothing else."""

    def __init__(self) -> None:
        self.queries: set[str] = set()
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                where = urlsplit(self.path)
                site.queries.add(where.query)
                login = "Basic " + base64.b64encode(f"me:{NETRC}".encode()).decode()
                if not where.path.endswith("rows.jsonl"):
                    self.answer(404, b"")
                elif where.path.startswith("/private/") and self.headers.get("Authorization") != login:
                    self.answer(401, b"")
                elif part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                    start, stop = int(part[1]), min(int(part[2]) + 1, len(site.body))
                    self.answer(206, site.body[start:stop], f"bytes {start}-{stop - 1}/{len(site.body)}")
                else:
                    self.answer(200, site.body)

            def answer(self, status: int, body: bytes, span: str = "") -> None:
                self.send_response(status)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(body)))
                if span:
                    self.send_header("Content-Range", span)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.body = (ROWS + '{"other": "a bad row"}\n').encode()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


@dataclass
class User:
    """A user with a home, a cache and a folder of work, whose commands' output is kept."""

    folder: Path
    environment: dict[str, str]
    printed: list[tuple[str, bytes]] = field(default_factory=list)

    def run(self, *arguments: str) -> tuple[int, str]:
        ran = subprocess.run(
            ["forerun", *arguments],
            cwd=self.folder / "work",
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        self.printed.append((" ".join(arguments), ran.stdout))
        return ran.returncode, ran.stdout.decode()

    def leaks(self) -> list[str]:
        """Where a canary is: commands by their printed text, and files by content or name. Input is not output."""
        found = [command for command, text in self.printed if any(canary in text for canary in CANARIES)]
        for path in self.folder.rglob("*"):
            if path.name in (".netrc", "given.yaml"):
                continue
            text = os.fsencode(path) + (path.read_bytes() if path.is_file() else b"")
            found += [str(path)] if any(canary in text for canary in CANARIES) else []
        return found


@pytest.fixture
def user(tmp_path: Path, shell: dict[str, str]) -> User:
    for name in ("home", "work", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "my_tracker.py").write_text(TRACKER)
    settings = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    return User(tmp_path, {**shell, **settings})


def write_job(user: User, url: str, **more: object) -> None:
    job = {
        "name": "run",
        "model": {"layers": 1, "embed": 32, "heads": 2},
        "data": {"mixture": {"web": {"path": url}}, "bad_rows": 1},
        "sequence": 64,
        "batch": 4,
        "steps": 2,
        "track": {"to": ["my_tracker:Recorder"]},
        **more,
    }
    (user.folder / "work" / "given.yaml").write_text(json.dumps(job))


def test_the_query_of_a_url_is_used_and_is_nowhere_in_the_output(user: User, site: Site) -> None:
    write_job(user, f"{site.address}/rows.jsonl?download={QUERY}")
    site.queries.clear()
    assert user.run("check", "given.yaml")[0] == 0
    code, text = user.run("data", "given.yaml", "--html", "page.html")
    assert code == 0, text
    assert site.queries == {f"download={QUERY}"}
    code, text = user.run("train", "given.yaml", "--supervise")
    assert code == 0, text
    work = user.folder / "work"
    sent = json.loads((work / "runs" / "run" / "sent.json").read_text())
    assert sent["data.mixture.web.path"] == f"{site.address}/rows.jsonl?***"
    code, text = user.run("train", "given.yaml")  # the recorded job, without the query, is still the same job
    assert code == 0, text
    code, text = user.run("export", "runs/run", "--to", "out")
    assert code == 0, text
    assert "rows.jsonl" in (work / "out" / "README.md").read_text()
    code, text = user.run("train", "runs/run/job.yaml", "name=other")
    assert code == 2, text
    assert user.leaks() == []


@pytest.mark.aot
def test_a_plan_has_no_query(user: User, site: Site) -> None:
    write_job(user, f"{site.address}/rows.jsonl?download={QUERY}")
    code, text = user.run("plan", "given.yaml", "--on", "v5e-1", "--html", "page.html", "--json")
    assert code == 0, text
    assert "rows.jsonl?***" in (user.folder / "work" / "page.html").read_text()
    assert list((user.folder / "cache").rglob("verdicts/*.json"))
    assert user.leaks() == []


def test_errors_have_no_query(user: User, site: Site) -> None:
    with socket.socket() as held:  # bound and not listening: connections are refused
        held.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{held.getsockname()[1]}"
        for place in (f"{site.address}/nothing.jsonl", f"{site.address}/private/rows.jsonl", f"{closed}/rows.jsonl"):
            write_job(user, f"{place}?download={QUERY}")
            code, text = user.run("--debug", "data", "given.yaml")
            assert code == 2, text
            assert "Traceback" in text
    write_job(user, f"{site.address}/rows.jsonl?download={QUERY}")
    assert user.run("data", "given.yaml", "data.bad_rows=0")[0] == 2
    assert user.leaks() == []


@pytest.mark.parametrize(
    "override",
    [
        f"data.mixture.web.path=http://user:{PASSWORD}@HOST/rows.jsonl",
        f"data.mixture.web.path=http://{TOKEN}@HOST/rows.jsonl",
        f"data.mixture.web.path=http://user:{PASSWORD}/1#2@HOST/rows.jsonl",
        f"data.mixture.web.path=simplecache::http://user:{PASSWORD}@HOST/rows.jsonl",
        f"data.mixture.web.path=s3://id:{PASSWORD}@bucket/rows.jsonl",
        f"data.mixture.web.path=http://HOST/rows.jsonl?a=b&X-Amz-Signature={TOKEN}",
        f"data.mixture.web.path=http://HOST/rows.jsonl?token={TOKEN}",
        f"data.mixture.web.path='http://HOST/rows.jsonl?a=b {TOKEN}'",
        f"data.store=http://user:{PASSWORD}@HOST/store",
        f"data.tokenizer=http://user:{PASSWORD}@HOST/tokenizer.json",
        f"checkpoint.folder=gs://user:{PASSWORD}@HOST/run",
        f"model.name=https://user:{PASSWORD}@HOST/model",
        f"distil.teacher=https://user:{PASSWORD}@HOST/model",
        f"track.url=https://user:{PASSWORD}@HOST",
        f"steps=http://user:{PASSWORD}@HOST/a-path-that-is-too-long-to-be-shown-completely/file.jsonl",
        f"http://user:{PASSWORD}@HOST",
        f"model.options={{database: ['sql://user:{PASSWORD}@HOST']}}",
    ],
)
def test_credentials_are_rejected_without_being_shown(
    override: str, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.cli.main import main

    user = User(tmp_path, {})
    (tmp_path / "work").mkdir()
    write_job(user, "rows.jsonl")
    text = override.replace("HOST", urlsplit(site.address).netloc)
    site.queries.clear()
    assert main(["--debug", "check", str(tmp_path / "work" / "given.yaml"), text]) == 2
    printed = capsys.readouterr()
    user.printed.append((text, (printed.out + printed.err).encode()))
    assert user.leaks() == []
    assert site.queries == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", f"http://host/given.yaml?download={QUERY}"],  # pathlib makes one slash of two
        ["check", f"http://user:{PASSWORD}@host/given.yaml"],
        ["generate", f"https://user:{PASSWORD}@host/model", "Once"],
        ["eval", "model", f"--data=https://host/text.txt?sig={TOKEN}"],
        ["eval", "model", "--data", f"https://user:{PASSWORD}@host/text.txt"],
        [f"http://user:{PASSWORD}@host"],
    ],
)
def test_credentials_in_arguments_are_not_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from forerun.cli.main import main

    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not [canary for canary in CANARIES if canary in (printed.err + printed.out).encode()]


def test_netrc_is_the_alternative_to_a_password_in_a_url(user: User, site: Site) -> None:
    write_job(user, f"{site.address}/private/rows.jsonl")
    netrc = user.folder / "home" / ".netrc"
    netrc.touch(0o600)
    netrc.write_text(f"machine 127.0.0.1 login me password {NETRC}\n")
    code, text = user.run("data", "given.yaml")
    assert code == 0, text
    assert user.leaks() == []


def test_a_header_of_fsspecs_configuration_is_sent(user: User, site: Site) -> None:
    write_job(user, f"{site.address}/private/rows.jsonl")
    login = base64.b64encode(f"me:{NETRC}".encode()).decode()
    folder = user.folder / "home" / ".config" / "fsspec"
    folder.mkdir(parents=True)
    headers = {"Authorization": f"Basic {login}"}
    (folder / "conf.json").write_text(json.dumps({"http": {"client_kwargs": {"headers": headers}}}))
    code, text = user.run("data", "given.yaml")
    assert code == 0, text
    assert login not in text
