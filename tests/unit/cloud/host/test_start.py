"""The start of an agent: its settings and the index of its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_host import StubApi
from error_assertions import raises_error

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
    assert SETTINGS.run_folder == "runs/tiny"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\x00",
        b"[" * 100_000,
        *(
            json.dumps({**vars(SETTINGS), name: value}).encode()
            for name, value in (
                ("limit_seconds", "3600"),
                ("limit_seconds", -1),
                ("limit_seconds", 10**12),
                ("limit_seconds", True),
                ("deadline_at", float("nan")),
                ("deadline_at", 1e308),
                ("attempt", 0),
                ("hosts", 0),
                ("host", -1),
                ("folder", ""),
            )
        ),
    ],
)
def test_damaged_settings_are_reported(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.json"
    file.write_bytes(content)
    assert main([str(file)]) == USER_MISTAKE
    assert "E-CLOUD-040" in capsys.readouterr().err


def test_the_index_comes_from_the_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3")
    assert host_index(SETTINGS) == 1
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3,10.0.0.4")
    with raises_error("E-CLOUD-041"):
        host_index(SETTINGS)


def test_one_host_needs_no_metadata() -> None:
    assert host_index(AgentSettings(**{**vars(SETTINGS), "hosts": 1})) == 0
    assert host_index(AgentSettings(**{**vars(SETTINGS), "host": 1})) == 1


def test_machines_of_the_user_have_no_api() -> None:
    assert api_of(AgentSettings(**{**vars(SETTINGS), "provider": "ssh"})) is None


def test_an_api_without_credentials_fails_only_in_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent starts, and stops training at its deadline, while the server of the credentials does not answer."""
    calls: list[str] = []

    def provider(name: str, project: str | None) -> StubApi:
        if not calls:
            calls.append(name)
            raise UserError("E-CLOUD-001", "no credentials", why="down", fix="wait")
        return StubApi(5.0)

    monkeypatch.setattr("forerun.cloud.providers.provider_named", provider)
    api = api_of(SETTINGS)
    assert api is not None
    with pytest.raises(UserError):
        api.now()
    assert api.now() == 5.0
    assert api.status("forerun-tiny-1", "us-east5-b").ready_at == 1000.0
