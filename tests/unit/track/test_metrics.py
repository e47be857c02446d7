from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from forerun.track.metrics import MetricsLog, read_metrics, write_summary


def test_lines_are_on_disk_at_once_and_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    loss = float(np.float32(2.3456789))
    with MetricsLog(path, clock=lambda: 7.0001) as log:
        log.write(1, loss=loss, note="first")
        assert read_metrics(path) == [{"step": 1, "loss": loss, "note": "first", "unix_seconds": 7.0}]
        log.write(2, loss=np.float32(0.5), tokens=np.int64(7))
    assert path.read_text().splitlines()[1] == '{"step": 2, "loss": 0.5, "tokens": 7, "unix_seconds": 7.0}'


def test_resuming_removes_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3, 4):
            log.write(step, loss=float(step))
    with path.open("a") as out:
        out.write('{"step": 5, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    with MetricsLog(path, resume_at=2) as log:
        log.write(3, loss=30.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_former_owner_of_the_run_writes_nothing_into_it_any_more(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as former:
        former.write(1, loss=1.0)
        with MetricsLog(path, resume_at=1) as log:
            former.write(2, loss=2.0)
            log.write(2, loss=2.0)
            former.write(3, loss=3.0)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_whole_looking_last_line_without_its_end_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.25}')  # perhaps 1.2578 was being written
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsLog(path, resume_at=9) as log:
        log.write(2, loss=1.2578)
    assert [row["loss"] for row in read_metrics(path)] == [2.5, 1.2578]


def test_a_fresh_run_starts_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize("broken", [b"not json", b"[1]", b'{"loss": 1}', b'{"step": "x"}', bytes(9), b"\xff"])
def test_a_broken_line_is_omitted(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 3}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_what_json_cannot_hold_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, clock=lambda: 7.0) as log:
        log.write(1, loss=math.nan, grad_norm=np.float32(math.inf))
    assert path.read_text() == '{"step": 1, "loss": null, "grad_norm": null, "unix_seconds": 7.0}\n'


def test_a_summary_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"loss": 2.5, "mfu": math.nan, "steps": [np.int64(1)]})
    with pytest.raises(TypeError):
        write_summary(path, {"loss": object()})
    assert json.loads(path.read_text()) == {"loss": 2.5, "mfu": None, "steps": [1]}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
