"""The folder of a job file with stages means the run of its last stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.config.stages import stages_of
from forerun.errors import UserError
from forerun.run_folder.stage_folder import run_of, write_stage_names
from forerun.trained_model.model_source import model_source


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    file = tmp_path / "night.yaml"
    file.write_text("model: owner/name\ndata: texts\nstages: {a: {}, b: {}}\n")
    write_stage_names(stages_of(file, [f"runs={tmp_path / 'runs'}"]))
    return tmp_path / "runs"


def started(runs: Path, *names: str) -> None:
    for name in names:
        (runs / name).mkdir()
        (runs / name / "job.yaml").write_text("model: owner/name\ndata: texts\n")


def mistake(source: Path, stage: str | None = None) -> UserError:
    with pytest.raises(UserError) as raised:
        run_of(source, stage)
    return raised.value


def test_the_folder_means_the_last_stage(runs: Path) -> None:
    assert json.loads((runs / "night/stages.json").read_text()) == {"stages": {"a": "night-a", "b": "night-b"}}
    started(runs, "night-a", "night-b")
    assert run_of(runs / "night") == runs / "night-b"
    assert run_of(runs / "night", "a") == runs / "night-a"
    assert run_of(runs / "night-a") == runs / "night-a"


def test_a_stage_without_a_run_is_reported(runs: Path) -> None:
    started(runs, "night-a")
    assert_error(mistake(runs / "night"), "E-RUN-063", what="'b'", why="started: a", fix=str(runs / "night-a"))
    assert_error(mistake(runs / "night", "x"), "E-RUN-063", why="a, b")
    assert_error(mistake(runs / "night-a", "a"), "E-RUN-062")


def test_a_damaged_list_is_reported(runs: Path) -> None:
    (runs / "night/stages.json").write_text("[]")
    assert_error(mistake(runs / "night"), "E-RUN-064")


def test_a_run_of_the_same_name_is_not_hidden(tmp_path: Path, runs: Path) -> None:
    started(runs, "day")
    stages = stages_of(tmp_path / "night.yaml", [f"runs={runs}", "name=day"])
    with pytest.raises(UserError) as raised:
        write_stage_names(stages)
    assert_error(raised.value, "E-RUN-065", what="day")


def test_a_misspelt_run_with_stages_is_suggested(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    with pytest.raises(UserError) as raised:
        model_source("runs/nigth")
    assert_error(raised.value, "E-RUN-033", fix="night")
