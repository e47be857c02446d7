"""Uploads by the hub's own client to a hub that answers wrongly: every answer ends in success or in an error code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from error_assertions import assert_error
from huggingface_hub import constants
from huggingface_hub.utils import http_backoff
from upload_server import UploadServer, _UploadHandler

from forerun.errors import UserError
from forerun.hub.upload import push_folder
from forerun.safe_text import safe_streams

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
FILES = {"README.md": b"# model\n", "model.safetensors": b"weights" * 1000}
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
        super().__init__(root, owners={"hf_ada": "ada"})
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
def folder(tmp_path: Path) -> Path:
    export = tmp_path / "export"
    export.mkdir()
    for name, content in FILES.items():
        (export / name).write_bytes(content)
    return export


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileHub]:
    (tmp_path / "hub").mkdir()
    with HostileHub(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_ada")
        monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", 0)
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()


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
def test_wrong_answers_have_an_error_code(hub: HostileHub, folder: Path, route: str, body: bytes) -> None:
    hub.answers[route] = body
    code = error_code_of_push(folder)
    if code is None:  # the client did not need what is wrong in the answer
        assert {name: path.read_bytes() for name, path in hub.files("ada/model").items() if name in FILES} == FILES
    else:
        assert code in {"E-HUB-053", "E-HUB-056", "E-HUB-063", "E-HUB-064"}


def test_files_that_the_hub_ignores_are_an_error(hub: HostileHub, folder: Path) -> None:
    hub.ignored = {"model.safetensors"}
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-063", what="ada/model", why="model.safetensors")


@pytest.mark.parametrize("absolute", [False, True])
def test_listed_names_outside_of_the_folder_are_not_read(
    hub: HostileHub, folder: Path, tmp_path: Path, absolute: bool
) -> None:
    """A hub that lists a file of this computer with its true digest must not learn that it exists."""
    push_folder(folder, "ada/model")
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")
    name = str(secret) if absolute else "../secret"
    blob = hashlib.sha1(b"blob 3\0key").hexdigest()
    hub.siblings = [{"rfilename": name, "size": 3, "blobId": blob}]
    with pytest.raises(UserError) as raised:
        push_folder(folder, "ada/model")
    assert_error(raised.value, "E-HUB-053", why=name)


def test_a_commit_name_with_control_characters_is_printed_as_escapes(
    hub: HostileHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"success": True, "commitOid": "\x1b[2J", "commitUrl": f"{hub.endpoint}/ada/model/commit/x"}
    push_folder(folder, "ada/model")
    hub.answers[ROUTES["commit"]] = json.dumps(answer).encode()
    (folder / "README.md").write_bytes(b"# other\n")
    with safe_streams():
        assert error_code_of_push(folder) in {"E-HUB-053", "E-HUB-063"}
    assert "\x1b" not in capsys.readouterr().out
