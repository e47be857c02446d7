"""The start of an agent: its settings and the index of its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cloud.host.__main__ import main
from forerun.cloud.host.settings import AgentSettings, read_settings
from forerun.cloud.host.start import api_of, host_index
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE

SETTINGS = AgentSettings("gs://b/tiny", 1, 2, "tiny", "tpu", "forerun-tiny-1", "us-east5-b")


def test_settings_ignore_keys_of_newer_versions(tmp_path: Path) -> None:
    file = tmp_path / "agent.json"
    file.write_text(json.dumps({**vars(SETTINGS), "colour": "blue"}))
    assert read_settings(file) == SETTINGS
    assert SETTINGS.relative_run_folder == "runs/tiny"


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_damaged_settings_are_reported(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.json"
    file.write_text(text)
    assert main([str(file)]) == USER_MISTAKE
    assert "E-CLOUD-040" in capsys.readouterr().err


def test_the_index_comes_from_the_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3")
    assert host_index(SETTINGS) == 1
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3,10.0.0.4")
    with pytest.raises(UserError, match="E-CLOUD-041"):
        host_index(SETTINGS)


def test_one_host_needs_no_metadata() -> None:
    assert host_index(AgentSettings(**{**vars(SETTINGS), "hosts": 1})) == 0
    assert host_index(AgentSettings(**{**vars(SETTINGS), "host": 1})) == 1


def test_machines_of_the_user_have_no_api() -> None:
    assert api_of(AgentSettings(**{**vars(SETTINGS), "provider": "ssh"})) is None
