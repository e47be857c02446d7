"""Folders in a bucket, with the emulators of both services and with a server that answers as the test says."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from emulated_buckets import EmulatedBuckets, emulated_buckets
from recording_reporter import RecordingReporter

from forerun.errors import UserError
from forerun.storage import bucket as module
from forerun.storage.bucket import BucketFolder
from forerun.storage.folder import FileRange, Folder, LocalFolder, create_once, remove_command
from forerun.storage.open_folder import folder_at
from forerun.storage.retries import RetrySchedule, StorageUnavailable

KINDS = ("local", "gs", "s3")


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedBuckets]:
    with emulated_buckets(tmp_path_factory.mktemp("buckets")) as found:
        yield found


def folder_of(kind: str, buckets: EmulatedBuckets, tmp_path: Path) -> Folder:
    return folder_at(tmp_path if kind == "local" else f"{buckets.address(kind)}/{tmp_path.name}/")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_folder_behaves_alike(kind: str, buckets: EmulatedBuckets, tmp_path: Path) -> None:
    top = folder_of(kind, buckets, tmp_path)
    folder = top.inside("store")
    assert folder.is_local == (kind == "local")
    assert (folder.names(), folder.files()) == ([], set())
    folder.require_writable()
    assert folder.files() == set(), "the probe is removed"
    assert folder.create("unit/a", b"0123456789")
    assert folder.create("unit/empty", b"")
    assert not folder.create("unit/a", b"other")
    assert folder.create("index.json", b"{}")
    assert top.create("store2/x", b"a neighbour whose name begins alike")
    assert folder.files() == {"unit/a", "unit/empty", "index.json"}
    assert folder.names() == ["index.json", "unit"]
    assert (folder.names("unit"), top.names("none")) == (["a", "empty"], [])
    assert (folder.exists("unit/a"), folder.exists("unit/empty"), folder.exists("unit/b")) == (True, True, False)
    assert folder.read("unit/a") == b"0123456789"
    assert folder.read_many(["unit/empty", "none", "index.json"]) == [b"", None, b"{}"]
    ranges = [(0, 1), (3, 7), (9, 10), (5, 5)]
    assert folder.read_ranges([FileRange("unit/a", *one) for one in ranges]) == [b"0", b"3456", b"9", b""]
    assert len(folder.read_ranges([FileRange("unit/a", 8, 20)])[0]) < 12, "no invented bytes"
    assert folder.read_ranges([FileRange("unit/a", 10, 11), FileRange("unit/empty", 0, 1)]) == [b"", b""]
    for read in (lambda: folder.read("none"), lambda: folder.read_ranges([FileRange("none", 0, 4)])):
        with pytest.raises(FileNotFoundError):
            read()
    folder.replace("unit/a", b"new")
    assert folder.read("unit/a") == b"new"
    assert pickle.loads(pickle.dumps(folder)) == folder
    folder.remove("unit")
    folder.remove("index.json")
    folder.remove("index.json")
    assert folder.files() == set()
    assert top.read("store2/x")


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_of_many_creates_succeeds(kind: str, buckets: EmulatedBuckets, tmp_path: Path) -> None:
    folder = folder_of(kind, buckets, tmp_path)
    for name in ("a", "b"):
        with ThreadPoolExecutor(12) as threads:
            created = list(threads.map(lambda n, name=name: folder.create(name, bytes([n]) * 1000), range(12)))
        assert sum(created) == 1
        assert folder.read(name) == bytes([created.index(True)]) * 1000


class Service:
    """A server that gives the same answer to every request, and records what was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                service.asked.append((self.command, self.path, headers))
                status, body = service.reply(self.command)
                self.send_response(status)
                self.send_header("ETag", '"1"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, method: str) -> tuple[int, bytes]:
        return self.status, self.body


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Serve S3, whose endpoint is a part of each opened store, so that it can change in a process."""
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", service.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(module, "REQUEST_RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"})
    with fresh_context():
        yield service
    service.server.shutdown()
    service.server.server_close()
    thread.join()


@contextmanager
def fresh_context() -> Iterator[None]:
    module._context.cache_clear()
    yield
    module._context.cache_clear()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "E-DATA-170", UserError),
        (403, "E-DATA-170", UserError),
        (400, "E-DATA-173", UserError),
        (503, "E-DATA-172", StorageUnavailable),
        (429, "E-DATA-172", StorageUnavailable),
    ],
)
def test_answers_become_errors_with_codes(service: Service, status: int, code: str, kind: type[UserError]) -> None:
    service.status, folder = status, BucketFolder("s3://some-bucket/tokens")
    for call in (lambda: folder.read("a"), lambda: folder.files(), lambda: folder.create("a", b"x")):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code == code
        assert type(caught.value) is kind


def test_missing_bucket_is_named(service: Service, buckets: EmulatedBuckets) -> None:
    service.status = 404
    for address in ("s3://some-bucket/tokens", "gs://no-such-bucket/tokens"):
        with pytest.raises(UserError) as caught:
            folder_at(address).require_writable()
        assert caught.value.code == "E-DATA-171"
        assert address.split("/")[2] in caught.value.fix


def test_no_connection_is_a_storage_error(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable) as caught:
        BucketFolder("s3://some-bucket/tokens").read("a")
    assert caught.value.code == "E-DATA-172"


def test_create_carries_its_condition_to_s3(service: Service) -> None:
    service.reply = lambda method: (404 if method == "HEAD" else 200, b"")
    assert BucketFolder("s3://some-bucket/tokens").create("a", b"x")
    (put,) = (headers for method, _, headers in service.asked if method == "PUT")
    assert put["if-none-match"] == "*"


def test_driver_repeats_failed_requests_and_counts_them(service: Service) -> None:
    folder = BucketFolder("s3://some-bucket/tokens")
    answers = iter([(503, b""), (200, b"content")])
    service.reply = lambda method: next(answers)
    before = folder.repeated_requests
    assert folder.read("a") == b"content"
    assert folder.repeated_requests == before + 1


@pytest.mark.parametrize("address", ["gs://", "gs:///tokens", "s3:///"])
def test_address_without_a_bucket_is_an_error(address: str) -> None:
    with pytest.raises(UserError) as caught:
        folder_at(address)
    assert caught.value.code == "E-DATA-174"


class DeniedStore:
    """A store of Google Cloud Storage that may not be listed: the listing is empty, and each object is denied."""

    def list(self, *_: object, **__: object) -> Future[list[bytes]]:
        answer: Future[list[bytes]] = Future()
        answer.set_result([])
        return answer

    def read(self, *_: object, **__: object) -> Future[None]:
        answer: Future[None] = Future()
        answer.set_exception(ValueError("PERMISSION_DENIED: HTTP response code: 403"))
        return answer


def test_denied_listing_is_not_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_opened", lambda *_: DeniedStore())
    for call in (BucketFolder("gs://bucket/a").names, BucketFolder("gs://bucket/a").files):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code == "E-DATA-170"


@pytest.mark.parametrize("kind", KINDS)
def test_created_once_if_the_content_is_equal(kind: str, buckets: EmulatedBuckets, tmp_path: Path) -> None:
    folder = folder_of(kind, buckets, tmp_path)
    assert [create_once(folder, "a", content) for content in (b"1", b"2", b"1")] == [True, False, True]
    assert folder.read("a") == b"1"


def test_temporary_errors_of_a_call_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    folder = BucketFolder("s3://bucket/a", RetrySchedule(first_seconds=0.0), RecordingReporter(lines))
    errors = iter([ValueError("ABORTED: All retry attempts failed"), TimeoutError("read")])

    def call() -> str:
        for error in errors:
            raise error
        return "result"

    assert folder.with_retries(call) == "result"
    assert len(lines) == 3
    with pytest.raises(ValueError, match="INVALID_ARGUMENT"):
        folder.with_retries(lambda: (_ for _ in ()).throw(ValueError("INVALID_ARGUMENT: chunk")))


def test_address_of_another_protocol_is_no_folder() -> None:
    with pytest.raises(UserError) as caught:
        folder_at("https://host/checkpoints")
    assert caught.value.code == "E-DATA-174"


def test_places_and_commands_for_users(tmp_path: Path) -> None:
    assert LocalFolder(tmp_path).location == tmp_path
    assert BucketFolder("s3://bucket/tokens/").location == "s3://bucket/tokens"
    assert remove_command("gs://b/x", whole_folder=True) == "gcloud storage rm -r gs://b/x"
    assert remove_command("s3://b/x", whole_folder=False) == "aws s3 rm s3://b/x"
    assert json.loads(json.dumps(folder_at("gs://b").inside("x").address)) == "gs://b/x"
