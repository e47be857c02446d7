"""What `generate`, `chat` and `eval` take as a source, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.cli.main import main
from forerun.exit_codes import USER_MISTAKE
from forerun.hub.snapshot import snapshot
from forerun.trained_model.model_source import checkpoint_section


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Any request to the hub would fail with another error than the expected one.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def run_folder(name: str) -> Path:
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("model: qwen3-0.6b\ndata: texts\n", encoding="utf-8")
    return folder


def test_a_run_that_does_not_exist_is_not_looked_for_on_the_hub() -> None:
    with raises_error("E-RUN-033", "runs/nope"):
        checkpoint_section("runs/nope")
    run_folder("runs/night")
    with raises_error("E-RUN-033", "runs/nigth") as caught:
        checkpoint_section("runs/nigth")
    assert "runs/night" in caught.value.fix
    run_folder("elsewhere/night")
    with raises_error("E-RUN-033", "elsewhere/nope"):
        checkpoint_section("elsewhere/nope")


@pytest.mark.parametrize("command", [["generate", "Once"], ["chat"], ["eval", "--data", "x.txt"]])
def test_every_command_says_that_the_run_does_not_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_text("text", encoding="utf-8")
    name, *rest = command
    assert main([name, "runs/nope", *rest]) == USER_MISTAKE
    told = capsys.readouterr().err
    assert "no run runs/nope" in told
    assert "hub cannot be reached" not in told


def test_names_of_the_hub_and_folders_stay_what_they_are() -> None:
    assert checkpoint_section("owner/name", "main").name == "owner/name"
    Path("owner").mkdir()
    assert checkpoint_section("owner/name").name == "owner/name"
    Path("model").mkdir()
    assert checkpoint_section("model").name == "./model"
    run_folder("owner/night")
    Path("owner/model").mkdir()
    Path("owner/model/config.json").write_text("{}", encoding="utf-8")
    assert checkpoint_section("owner/model").name == "owner/model"


@pytest.mark.parametrize(
    "source", ["https://host/model", "https://host/a/b.git", "s3://bucket/x", "qwen3-0.6b", "a:b", "x:"]
)
@pytest.mark.parametrize("command", [["generate", "Once"], ["eval", "--data", "x.txt"]])
def test_a_source_that_is_neither_is_the_users_mistake(
    source: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.txt").write_text("text", encoding="utf-8")
    name, *rest = command
    assert main([name, source, *rest]) == USER_MISTAKE
    assert "bug" not in capsys.readouterr().err


def test_a_run_is_not_a_model() -> None:
    run_folder("runs/night")
    with raises_error("E-HUB-029") as caught:
        snapshot("runs/night")
    assert "forerun export runs/night --to " in caught.value.fix
