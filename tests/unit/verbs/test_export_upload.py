"""`forerun export --push`: a run, a folder that exists, and a second call after an interruption."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error
from huggingface_hub import constants, utils

from forerun.checkpoint import reader
from forerun.errors import UserError
from forerun.run_folder import run_folder
from forerun.run_folder.run_folder import RunFolder
from forerun.verbs.export import write_model
from forerun.verbs.export.export import export, is_export
from forerun.verbs.export.result import Export, ExportForm

sys.path.append(str(Path(__file__).parents[1] / "hub"))
# The hub's client passes the body of an upload to a parameter that its HTTP library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_ada"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    from upload_server import UploadServer

    (tmp_path / "hub").mkdir()
    with UploadServer(tmp_path / "hub", owners={TOKEN: "ada"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        utils.disable_progress_bars()
        yield server
        utils.enable_progress_bars()


def written(folder: Path) -> Export:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# model")
    return Export(folder, "proof")


def test_an_exported_folder_is_uploaded_as_it_is(hub: object, tmp_path: Path) -> None:
    folder = written(tmp_path / "out").folder
    done = export(folder, push="ada/model")
    assert done.upload is not None
    assert done.upload.url.endswith("/ada/model")
    assert (tmp_path / "hub/ada/model/config.json").read_text() == "{}"


def test_adapters_of_a_local_base_are_not_uploaded(hub: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "out").folder
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    with pytest.raises(UserError) as raised:
        export(folder, push="ada/model")
    assert_error(raised.value, "E-HUB-065", what=str(config), why=str(tmp_path / "base"))
    assert hub.requests == []
    config.write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    assert export(folder, push="ada/model").upload is not None


def test_a_run_without_a_folder_is_exported_once(hub: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has the step and the options in its name, and the second call uses it again."""
    run, calls = tmp_path / "run", []

    def write_export(source: RunFolder, to: Path, form: ExportForm, **options: object) -> Export:
        calls.append(to)
        return written(to)

    monkeypatch.setattr(write_model, "write_export", write_export)
    monkeypatch.setattr(run_folder, "require_run", lambda run, warn: object())
    monkeypatch.setattr(RunFolder, "checkpoints", lambda self, job: run, raising=False)
    monkeypatch.setattr(reader, "chosen_step", lambda checkpoints, step: 12)
    for _ in range(2):
        done = export(run, push="ada/model", merge=True, gguf="q8_0")
        assert done.folder == run / "exports" / "step-12-merged-q8_0"
    assert calls == [run / "exports" / "step-12-merged-q8_0"]


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as raised:
        export(tmp_path)
    assert_error(raised.value, "E-COMMAND-052")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError) as raised:
        export(tmp_path, tmp_path / "out", push="no-owner")
    assert_error(raised.value, "E-HUB-050")


def test_a_run_is_not_an_export(tmp_path: Path) -> None:
    folder = written(tmp_path / "out").folder
    assert is_export(folder)
    (folder / "job.yaml").write_text("name: run\n")
    assert not is_export(folder)
    assert not is_export(tmp_path / "nothing")
