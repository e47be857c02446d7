"""Reading a run that grows, is truncated, replaced or renamed while it is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from error_assertions import assert_error
from written_run import WrittenRun, row

from forerun.config.load import dump
from forerun.errors import UserError
from forerun.journal import TailReader
from forerun.report.run_record import RunRecord, read_run
from forerun.watch.run_reader import FolderReader, open_reader


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "runs")


def values(record: RunRecord) -> str:
    """All values of the records, with tuples as lists."""
    return json.dumps({name: value for name, value in vars(record).items() if name != "job"}) + dump(record.job)


def test_a_growing_run_is_the_run_that_is_read_as_a_unit(run: WrittenRun) -> None:
    reader = FolderReader(run.path)
    assert reader.read().step == 0
    run.steps(1, 3)
    run.event("start", 0)
    assert values(reader.read()) == values(read_run(run.path))
    run.steps(4, 9)
    run.append("skips.jsonl", {"step": 5, "why": "loss is not finite"})
    run.write("hosts.json", {"unix_seconds": 1.0, "hosts": []})
    run.write("summary.json", {"steps": 9})
    assert values(reader.read()) == values(read_run(run.path))
    assert reader.read().skips == {5: "loss is not finite"}


def test_only_new_bytes_are_read(run: WrittenRun) -> None:
    run.steps(1, 3)
    parsed: list[bytes] = []

    def parse(line: bytes) -> dict[str, int]:
        parsed.append(line)
        return dict(json.loads(line))

    reader = TailReader(run.path / "metrics.jsonl", parse)
    assert [one["step"] for one in reader.rows()] == [1, 2, 3]
    run.steps(4, 4)
    assert [one["step"] for one in reader.rows()] == [4]
    assert list(reader.rows()) == []
    assert (len(parsed), reader.generation) == (4, 0)


def test_an_incomplete_line_is_read_when_it_is_complete(run: WrittenRun) -> None:
    run.steps(1, 1)
    reader = FolderReader(run.path)
    with (run.path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 2, "lo')
        out.flush()
        assert reader.read().step == 1
        out.write('ss": 1.5}\n')
    assert reader.read().points("loss")[-1] == (2, 1.5)


def test_a_resumed_run_replaces_the_file(run: WrittenRun) -> None:
    """The new file has fewer lines, and then others with the same steps."""
    run.steps(1, 6)
    reader = FolderReader(run.path)
    assert reader.read().step == 6
    metrics = run.path / "metrics.jsonl"
    part = metrics.with_name("part")
    part.write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2)))
    os.replace(part, metrics)
    assert reader.read().step == 2
    run.append("metrics.jsonl", {**row(3), "loss": 9.0})
    assert reader.read().points("loss") == [(1, 3.9), (2, 3.8), (3, 9.0)]


@pytest.mark.parametrize("rows", [0, 1, 8])
def test_a_truncated_file_is_read_from_its_beginning(run: WrittenRun, rows: int) -> None:
    """With 8 rows the file is longer than before and has the same inode, so only its content shows the change."""
    run.steps(1, 4)
    reader = FolderReader(run.path)
    assert reader.read().step == 4
    with (run.path / "metrics.jsonl").open("r+") as file:
        file.truncate()
    run.append("metrics.jsonl", *({**row(step), "loss": 0.5} for step in range(1, rows + 1)))
    assert reader.read().points("loss") == [(step, 0.5) for step in range(1, rows + 1)]


def test_a_run_that_starts_again_in_a_new_folder_is_followed(run: WrittenRun) -> None:
    run.steps(1, 4)
    reader = FolderReader(run.path)
    reader.read()
    run.path.rename(run.path.with_name("short.old-1"))
    with pytest.raises(UserError) as caught:
        reader.read()
    assert_error(caught.value, "E-RUN-020")
    again = WrittenRun(run.path.parent)
    again.steps(1, 1)
    assert reader.read().step == 1


def test_a_folder_with_stages_is_its_last_stage(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("both-first", "both-second"):
        WrittenRun(runs, name).steps(1, 2)
    (runs / "both").mkdir()
    (runs / "both" / "stages.json").write_text(json.dumps({"stages": {"first": "both-first", "second": "both-second"}}))
    assert FolderReader(runs / "both").read().name == "both-second"


def test_a_bucket_is_asked_less_often_than_a_folder(run: WrittenRun) -> None:
    assert open_reader("gs://bucket/checkpoints/short").every_seconds == 30.0
    assert open_reader(run.path).every_seconds == 1.0
    assert open_reader("gs://bucket/checkpoints/short").folder is None
