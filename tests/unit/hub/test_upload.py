"""Uploads by the hub's own client to a hub on this machine: created, interrupted, continued, replaced and refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from error_assertions import assert_error
from huggingface_hub import constants
from huggingface_hub.utils import http_backoff
from recording_reporter import RecordingReporter
from upload_server import UploadServer

from forerun.errors import UserError
from forerun.hub.upload import push_folder

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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadServer]:
    (tmp_path / "hub").mkdir()
    with UploadServer(tmp_path / "hub", owners={TOKEN: "ada"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has another protocol
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()


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
