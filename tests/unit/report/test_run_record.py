"""The records of a run, written by hand and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.config.load import dump, load
from forerun.errors import UserError
from forerun.report.run_record import read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = tmp_path / "job.yaml"
    job.write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: text\nsteps: 20\nname: short\n")
    run = tmp_path / "runs" / "short"
    run.mkdir(parents=True)
    (run / "job.yaml").write_text(dump(load(job).job))
    rows = [
        {"step": 10, "loss": 3.0, "unix_seconds": 1.0},
        {"step": 10, "samples": [{"prompt": "It", "text": " was"}], "unix_seconds": 1.5},
        {"step": 20, "loss": None, "unix_seconds": 2.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_metrics_and_samples(folder: Path) -> None:
    record = read_run(folder)
    assert record.name == "short"
    assert record.step == 20
    assert record.points("loss") == [(10, 3.0)]
    assert record.samples == [(10, [{"prompt": "It", "text": " was"}])]
    assert not record.is_finished


def test_broken_lines_count_as_missing(folder: Path) -> None:
    (folder / "events.jsonl").write_bytes(b'{"event": "start"}\n[1]\n\xff\n{"event": "pha')
    (folder / "hosts.json").write_bytes(b'{"hosts": [')
    record = read_run(folder)
    assert record.events == [{"event": "start"}]
    assert record.hosts == {}


@pytest.mark.parametrize(("steps", "finished"), [(20, True), (10, False)])
def test_a_summary_of_an_earlier_end_does_not_finish_a_longer_run(folder: Path, steps: int, finished: bool) -> None:
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    assert read_run(folder).is_finished is finished


def test_other_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_run(tmp_path)
    assert_error(error.value, "E-RUN-020")
