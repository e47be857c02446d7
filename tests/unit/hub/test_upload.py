"""Uploads by the hub's own client to a hub on this machine: created, interrupted, continued, replaced and refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from error_assertions import assert_error
from huggingface_hub import constants
from huggingface_hub.utils import http_backoff
from recording_reporter import RecordingReporter
from upload_server import UploadServer, _UploadHandler

from forerun.errors import UserError
from forerun.hub.upload import push_folder
from forerun.safe_text import safe_streams

# The hub's client passes the body of an upload to a parameter that its HTTP library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_ada"
FILES = {
    "README.md": b"# model\n",
    "config.json": b"{}\n",
    "model-00001-of-00002.safetensors": b"first" * 5000,
    "model-00002-of-00002.safetensors": b"second" * 5000,
    "adapter/adapter_config.json": b'{"r": 2}\n',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "export"


@contextmanager
def connected(server: UploadServer) -> Iterator[UploadServer]:
    """Run the server, and make the client use it."""
    with server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has another protocol
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[UploadServer]:
    (tmp_path / "hub").mkdir()
    with connected(UploadServer(tmp_path / "hub", owners={TOKEN: "ada"})) as server:
        yield server


def on_hub(hub: UploadServer, name: str = "ada/model") -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in hub.files(name).items() if path != ".gitattributes"}


def digest(name: str) -> str:
    return hashlib.sha256(FILES[name]).hexdigest()


def test_a_new_repository_is_private_and_has_all_files(hub: UploadServer, folder: Path) -> None:
    said: list[str] = []
    done = push_folder(folder, "ada/model", message="Upload step 12", reporter=RecordingReporter(said))
    assert on_hub(hub) == FILES
    assert hub.visibility == {"ada/model": "private"}
    assert hub.messages == ["Upload step 12"]
    assert (done.url, done.is_private) == (f"{hub.endpoint}/ada/model", True)
    assert done.commit == hub.commit("ada/model")
    assert len(said) == 2
    assert {request.token for request in hub.requests} <= {TOKEN, None}


def test_a_public_repository(hub: UploadServer, folder: Path) -> None:
    assert not push_folder(folder, "ada/model", public=True).is_private
    assert hub.visibility == {"ada/model": "public"}
    (folder / "config.json").write_bytes(b"{ }")
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model", overwrite=True)
    assert_error(raised.value, "E-HUB-052", what="ada/model")
    assert on_hub(hub) == FILES


def test_an_interrupted_upload_continues(hub: UploadServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call sends only what the hub does not have."""
    monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", 0)  # the client would try again at once
    hub.drop = digest("model-00002-of-00002.safetensors")
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-056", what="ada/model", fix=f"forerun export {folder} --push ada/model")
    assert on_hub(hub) == {}
    assert digest("model-00002-of-00002.safetensors") not in hub.stored
    push_folder(folder, "ada/model")
    assert on_hub(hub) == FILES
    wanted = [digest(name) for name in FILES if name.endswith(".safetensors")]
    assert sorted(hub.stored) == sorted(wanted), "each object was sent once"


def test_the_same_folder_again_sends_no_weights(hub: UploadServer, folder: Path) -> None:
    push_folder(folder, "ada/model")
    sent = len(hub.stored)
    push_folder(folder, "ada/model")
    assert len(hub.stored) == sent
    assert on_hub(hub) == FILES


def test_other_content_is_not_replaced_without_a_word(hub: UploadServer, folder: Path) -> None:
    push_folder(folder, "ada/model")
    (folder / "config.json").write_bytes(b"[]\n")  # the same size
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-053", why="config.json, model-00002-of-00002.safetensors", fix="--overwrite")
    assert on_hub(hub) == FILES
    push_folder(folder, "ada/model", overwrite=True)
    changed = {**FILES, "config.json": b"[]\n"}
    del changed["model-00002-of-00002.safetensors"]
    assert on_hub(hub) == changed
    assert (hub.root / "ada/model/.gitattributes").exists()


@pytest.mark.parametrize(("token", "name"), [("hf_expired", "ada/model"), (TOKEN, "bob/model")])
def test_a_token_that_may_not_write(
    hub: UploadServer, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str, name: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as raised:
        push_folder(folder, name)
    assert_error(raised.value, "E-HUB-054", what=name)
    assert token not in str(raised.value)


def test_another_commit_comes_first(hub: UploadServer, folder: Path) -> None:
    push_folder(folder, "ada/model")
    hub.race = True
    (folder / "config.json").write_bytes(b"{ }")
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model", overwrite=True)
    assert_error(raised.value, "E-HUB-055", fix="--overwrite")


def test_what_is_checked_before_anything_is_sent(
    hub: UploadServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "a/b/c", "../model"):
        with pytest.raises(UserError) as raised:
            push_folder(folder, name)
        assert_error(raised.value, "E-HUB-050")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-051")
    assert hub.requests == []


# ---- A hub that answers wrongly: every answer ends in success or in an error code ----

ROUTES = {
    "info": r"/api/models/ada/model",
    "create": r"/api/repos/create",
    "preupload": r".*/preupload/main",
    "batch": r".*/objects/batch",
    "commit": r".*/commit/main",
}
BODIES = {
    "html": b"<html>Log in to the network</html>",
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "empty object": b"{}",
    "nulls": b'{"siblings": [null], "files": [null], "objects": [null], "commitOid": null, "url": null, "id": null}',
    "wrong types": b'{"siblings": 5, "files": "x", "objects": 7, "commitOid": [], "commitUrl": {}, "url": 1, "id": []}',
}


class HostileHub(UploadServer):
    """A hub that replaces the answers of one route.

    Attributes:
      answers: the body of an answer, by the expression of its path.
      siblings: further files that the repository lists.
      ignored: files that the hub tells the client to ignore.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, owners={TOKEN: "ada"})
        self.answers: dict[str, bytes] = {}
        self.siblings: list[dict[str, Any]] = []
        self.ignored: set[str] = set()
        hub = self

        class Handler(_UploadHandler):
            server_hub = hub

            def _head(self, status: int, headers: Any, *more: Any) -> None:
                body = self._forged()
                changed = {} if body is None else {"Content-Length": str(len(body))}
                super()._head(status if body is None else 200, {**headers, **changed}, *more)
                if body is not None:
                    self.wfile.write(body)
                    self.wfile = _Sink()  # the true body
                    self.close_connection = True

            def _forged(self) -> bytes | None:
                path = self.path.partition("?")[0]
                return next((body for route, body in hub.answers.items() if re.fullmatch(route, path)), None)

            def _info(self, repository: str, branch: str) -> dict[str, Any]:
                info = super()._info(repository, branch)
                return info | {"siblings": [*info["siblings"], *hub.siblings]}

            def _mode(self, path: str) -> dict[str, Any]:
                return super()._mode(path) | {"shouldIgnore": path in hub.ignored}

        self._server.RequestHandlerClass = Handler


class _Sink:
    def write(self, content: bytes) -> int:
        return len(content)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    closed = False


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileHub]:
    (tmp_path / "hub").mkdir()
    monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", 0)
    server = HostileHub(tmp_path / "hub")
    with connected(server):
        yield server


def error_code_of_push(folder: Path) -> str | None:
    """Print the result of an upload. Return the code of its error, or None."""
    try:
        print(push_folder(folder, "ada/model"))
    except UserError as error:
        print(error)
        return error.code
    return None


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_wrong_answers_have_an_error_code(hostile: HostileHub, folder: Path, route: str, body: bytes) -> None:
    hostile.answers[route] = body
    code = error_code_of_push(folder)
    if code is None:  # the client did not need what is wrong in the answer
        assert on_hub(hostile) == FILES
    else:
        assert code in {"E-HUB-053", "E-HUB-056", "E-HUB-063", "E-HUB-064"}


def test_files_that_the_hub_ignores_are_an_error(hostile: HostileHub, folder: Path) -> None:
    hostile.ignored = {"model-00001-of-00002.safetensors"}
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-063", what="ada/model", why="model-00001-of-00002.safetensors")


@pytest.mark.parametrize("absolute", [False, True])
def test_listed_names_outside_of_the_folder_are_not_read(
    hostile: HostileHub, folder: Path, tmp_path: Path, absolute: bool
) -> None:
    """A hub that lists a file of this computer with its true digest must not learn that it exists."""
    push_folder(folder, "ada/model")
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")
    name = str(secret) if absolute else "../secret"
    blob = hashlib.sha1(b"blob 3\0key").hexdigest()
    hostile.siblings = [{"rfilename": name, "size": 3, "blobId": blob}]
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-053", why=name)


def test_a_commit_name_with_control_characters_is_printed_as_escapes(
    hostile: HostileHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"success": True, "commitOid": "\x1b[2J", "commitUrl": f"{hostile.endpoint}/ada/model/commit/x"}
    push_folder(folder, "ada/model")
    hostile.answers[ROUTES["commit"]] = json.dumps(answer).encode()
    (folder / "README.md").write_bytes(b"# other\n")
    with safe_streams():
        assert error_code_of_push(folder) in {"E-HUB-053", "E-HUB-063"}
    assert "\x1b" not in capsys.readouterr().out
