"""The list of exports of a run: one line per export, and never an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter

from forerun.report.run_record import read_lines
from forerun.reporter import SILENT
from forerun.run_folder.run_folder import RunFolder
from forerun.verbs.export.export import record_export
from forerun.verbs.export.result import Export


@pytest.fixture
def exported(tmp_path: Path) -> Export:
    folder = tmp_path / "out"
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"x" * 30)
    (folder / "adapter" / "weights").write_bytes(b"x" * 12)
    return Export(folder, "proof", step=60)


def test_each_export_is_a_line(tmp_path: Path, exported: Export) -> None:
    run, reporter = RunFolder(tmp_path), RecordingReporter()
    record_export(run, exported, reporter)
    record_export(run, Export(exported.folder, "proof", is_adapter=True, step=80), reporter)
    rows = read_lines(tmp_path / "exports.jsonl")
    assert [(row["step"], row["format"], row["bytes"]) for row in rows] == [
        (60, "Hugging Face", 42),
        (80, "PEFT adapter", 42),
    ]
    assert rows[0]["folder"] == str(exported.folder)
    assert reporter.warnings == []


def test_a_list_that_cannot_be_written_is_a_warning(tmp_path: Path, exported: Export) -> None:
    reporter = RecordingReporter()
    (tmp_path / "exports.jsonl").mkdir()
    record_export(RunFolder(tmp_path), exported, reporter)
    assert len(reporter.warnings) == 1
    assert str(tmp_path / "exports.jsonl") in reporter.warnings[0]


def test_a_line_is_json_with_a_time(tmp_path: Path, exported: Export) -> None:
    record_export(RunFolder(tmp_path), exported, SILENT)
    (line,) = (tmp_path / "exports.jsonl").read_text().splitlines()
    assert json.loads(line)["unix_seconds"] > 1.7e9
