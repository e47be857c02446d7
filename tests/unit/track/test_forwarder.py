from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_assertions import raises_error
from mlflow_server import MlflowServer
from recording_reporter import FailingReporter, RecordingReporter

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.reporter import SILENT
from forerun.track import forwarder
from forerun.track.backends import mlflow
from forerun.track.backends.job_trackers import trackers_of
from forerun.track.forwarder import tracking
from forerun.track.metrics import MetricsLog
from forerun.track.tracker import Row, TrackedRun

pytestmark = pytest.mark.timing

LAST = 30
PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another quickly; an answer, and the end, have all the time that a busy machine may need."""
    for name, seconds in (("POLL", 0.01), ("FIRST", 0.02), ("MAX", 0.1), ("END", PATIENCE_SECONDS)):
        monkeypatch.setattr(forwarder, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(mlflow, "ANSWER_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def server() -> Iterator[tuple[MlflowServer, str]]:
    made = MlflowServer()
    with made.serve() as url:
        yield made, url


def job_of(folder: Path, *track: str) -> Job:
    (folder / "job.yaml").write_text("model: qwen3-0.6b\ndata: texts\nname: one\n")
    return load(folder / "job.yaml", track).job


def write(log: MetricsLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.write(step, loss=10 / step, tokens=step)


def expected(last: int = LAST) -> list[tuple[str, int, float]]:
    return [row for step in range(1, last + 1) for row in (("loss", step, 10 / step), ("tokens", step, float(step)))]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def switch(server: MlflowServer, mode: str) -> None:
    """A server that answers has all the time for it; one that hangs is not waited for."""
    mlflow.ANSWER_SECONDS = 0.2 if mode == "hang" else PATIENCE_SECONDS
    server.mode = mode


@pytest.mark.parametrize("mode", ["500", "hang", "close", "lost", "slow"])
@pytest.mark.parametrize("first", [1, 11])
def test_every_row_once_and_in_order_though_the_server_fails(
    tmp_path: Path, server: tuple[MlflowServer, str], mode: str, first: int
) -> None:
    """From the start, and in the middle."""
    made, url = server
    metrics, told = tmp_path / "metrics.jsonl", list[str]()
    job = job_of(tmp_path, "track=mlflow", f"track.url={url}")
    switch(made, mode if first == 1 else "")
    with MetricsLog(metrics) as log, tracking(job, metrics, LAST, RecordingReporter(told)):
        write(log, 1, first - 1)
        before = 2 * max(first - 2, 0)  # a step is sent when a later one is there
        until(lambda: len(made.rows()) == before)
        switch(made, mode)
        write(log, first, LAST)
        if mode in ("500", "hang", "close"):
            until(lambda: bool(told))
            assert "metrics.jsonl and sent" in told[0]
            assert len(made.rows()) == before
            switch(made, "")
        until(lambda: len(made.rows()) == 2 * (LAST - 1))
        switch(made, "")
    assert made.rows() == expected()
    assert [run["status"] for run in made.runs.values()] == ["FINISHED"]
    assert made.runs["run0"]["params"]["model.name"] == "qwen3-0.6b"


def test_what_was_not_delivered_is_told_and_sent_by_the_next_start(
    tmp_path: Path, server: tuple[MlflowServer, str]
) -> None:
    made, url = server
    metrics, told = tmp_path / "metrics.jsonl", list[str]()
    job = job_of(tmp_path, "track=mlflow", f"track.url={url}")
    with MetricsLog(metrics) as log, tracking(job, metrics, LAST, RecordingReporter(told)):
        write(log, 1, 10)
        until(lambda: len(made.rows()) == 18)
        switch(made, "hang")
        write(log, 11, LAST)
    assert told[-1].startswith("mlflow does not have all rows, the last delivered step is 9 (")
    assert "the same command sends the rest" in told[-1]
    switch(made, "")
    with MetricsLog(metrics, resume_at=LAST), tracking(job, metrics, LAST, RecordingReporter(told)):
        pass
    assert made.rows() == expected()
    assert len(made.runs) == 1


def test_steps_that_a_resumed_run_repeats_are_not_sent_twice(tmp_path: Path, server: tuple[MlflowServer, str]) -> None:
    """Killed after step 20 with a checkpoint of step 12 and an older cursor; the server knows."""
    made, url = server
    metrics = tmp_path / "metrics.jsonl"
    job = job_of(tmp_path, "track=mlflow", f"track.url={url}")
    with MetricsLog(metrics) as log, tracking(job, metrics, LAST, SILENT):
        write(log, 1, 20)
    assert [run["status"] for run in made.runs.values()] == ["KILLED"]
    cursor = tmp_path / "tracked.json"
    written = json.loads(cursor.read_text())
    assert written["steps"] == {"mlflow": 20}
    cursor.write_text(json.dumps({**written, "steps": {"mlflow": 3}}))
    with MetricsLog(metrics, resume_at=12) as log, tracking(job, metrics, LAST, SILENT):
        write(log, 13, LAST)
    assert made.rows() == expected()


def test_all_lines_of_a_step_are_sent_together(tmp_path: Path, server: tuple[MlflowServer, str]) -> None:
    made, url = server
    metrics = tmp_path / "metrics.jsonl"
    job = job_of(tmp_path, "track=mlflow", f"track.url={url}")
    with MetricsLog(metrics) as log, tracking(job, metrics, LAST, FailingReporter()):
        for step in (1, 2, 3):
            log.write(step, loss=float(step))
            time.sleep(0.05)
            log.write(step, validation_loss=step / 2)
    assert made.rows() == [
        row for step in (1, 2, 3) for row in (("loss", step, float(step)), ("validation_loss", step, step / 2))
    ]


def test_a_server_that_is_not_there_costs_a_second_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[MlflowServer, str]
) -> None:
    """A name that nobody knows, a port that nobody has; and a secret is nowhere in what is told or written."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    monkeypatch.setattr(forwarder, "END_SECONDS", 1.0)
    for url in ("http://nobody.invalid:5000", "http://127.0.0.1:1"):
        metrics, told = tmp_path / "metrics.jsonl", list[str]()
        with (
            MetricsLog(metrics) as log,
            tracking(job_of(tmp_path, "track=mlflow", f"track.url={url}"), metrics, LAST, RecordingReporter(told)),
        ):
            write(log, 1, LAST)
        assert any("nothing was delivered" in text for text in told)
    monkeypatch.setattr(forwarder, "END_SECONDS", PATIENCE_SECONDS)
    made, url = server
    with tracking(job_of(tmp_path, "track=mlflow", f"track.url={url}"), metrics, LAST, RecordingReporter(told)):
        pass
    assert made.rows() == expected()
    assert made.authorizations == {"Bearer geheim"}
    assert "geheim" not in "".join([*told, *(path.read_text() for path in tmp_path.iterdir() if path.is_file())])


def test_event_files_hold_every_row_once_over_a_restart(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    loader = importlib.import_module(name) if os.environ.get("CI") else pytest.importorskip(name)
    metrics = tmp_path / "metrics.jsonl"
    job = job_of(tmp_path, "track=tensorboard")
    for first, last in ((0, 20), (12, LAST)):
        with MetricsLog(metrics, resume_at=first) as log, tracking(job, metrics, LAST, FailingReporter()):
            write(log, first + 1, last)
        (tmp_path / "tracked.json").unlink()
    read = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = [(event.step, round(event.value, 4)) for event in read.Scalars("loss")]
    assert found == [(step, round(10 / step, 4)) for step in range(1, LAST + 1)]


def test_samples_are_texts_in_tensorboard_and_no_metrics_of_mlflow(
    tmp_path: Path, server: tuple[MlflowServer, str]
) -> None:
    made, url = server
    metrics = tmp_path / "metrics.jsonl"
    job = job_of(tmp_path, "track.to=[tensorboard,mlflow]", f"track.url={url}")
    with MetricsLog(metrics) as log, tracking(job, metrics, 2, FailingReporter()):
        for step in (1, 2):
            log.write(step, loss=1.5)
            log.write(step, samples=[{"prompt": "Alice", "text": f"<was>\n*{step}*"}])
    assert made.rows() == [("loss", 1, 1.5), ("loss", 2, 1.5)]
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors("samples")]
    assert texts == [(step, f"    Alice\n\n    <was>\n    *{step}*") for step in (1, 2)]
    assert [event.value for event in read.Scalars("loss")] == [1.5, 1.5]


RATES = {
    "tokens_per_second": 1600.0,
    "samples_per_second": 3.2,
    "mfu": 0.4,
    "epoch": 0.75,
    "epoch_seconds": 6.25,
    "hbm_bytes": 7.0,
    "hbm_peak_bytes": 9.0,
}


def test_all_trackers_receive_the_rates_and_the_memory(
    tmp_path: Path, server: tuple[MlflowServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, url = server
    taken: list[Row] = []
    keeper = type("Keeper", (), {"begin": lambda self, run: None, "send": lambda self, rows: taken.extend(rows)})
    monkeypatch.setitem(sys.modules, "row_keeper", SimpleNamespace(Keeper=keeper))
    job = job_of(tmp_path, "track.to=[tensorboard,mlflow,row_keeper:Keeper]", f"track.url={url}")
    metrics = tmp_path / "metrics.jsonl"
    with MetricsLog(metrics) as log, tracking(job, metrics, 1, FailingReporter()):
        log.write(1, **RATES)
    assert {key: value for key, _, value in made.rows()} == pytest.approx(RATES)
    assert {key: taken[0][key] for key in RATES} == RATES
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {key: read.Scalars(key)[0].value for key in RATES} == pytest.approx(RATES)


TAKEN: list[Row] = []
THREADS: set[str] = set()


class Own:
    def begin(self, run: TrackedRun) -> int | None:
        assert run.name == "one"
        return None

    def send(self, rows: Sequence[Row]) -> None:
        THREADS.add(threading.current_thread().name)
        if len(THREADS) == 1 and not TAKEN:
            THREADS.add("failed once")
            raise RuntimeError("not yet")
        TAKEN.extend(rows)


def test_a_tracker_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text("class Half:\n    def send(self, rows): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "own_tracker", SimpleNamespace(Own=Own))
    metrics = tmp_path / "metrics.jsonl"
    job = job_of(tmp_path, "track=own_tracker:Own")
    told: list[str] = []
    for first, last in ((0, 20), (12, LAST)):
        with MetricsLog(metrics, resume_at=first) as log, tracking(job, metrics, LAST, RecordingReporter(told)):
            write(log, first + 1, last)
    assert [row["step"] for row in TAKEN] == list(range(1, LAST + 1))
    assert "not yet" in told[0]
    for name, what in (("my_tracker:Half", "lacks begin"), ("my_tracker:None_", "None_"), ("nowhere:X", "not found")):
        with pytest.raises(UserError, match=what):
            trackers_of(job_of(tmp_path, f"track={name}").track)


def test_mistakes_in_the_job_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises_error("E-TRACK-001"):
        trackers_of(job_of(tmp_path, "track=mlflow").track)
    with pytest.raises(UserError, match="'comet'"):
        job_of(tmp_path, "track=comet")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_USERNAME"):
        job_of(tmp_path, "track=mlflow", "track.url=http://me:geheim@host:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:geheim@host")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_USERNAME") as caught:
        trackers_of(job_of(tmp_path, "track=mlflow").track)
    assert "geheim" not in str(caught.value)


def test_a_broken_line_is_not_sent_and_stops_nothing(tmp_path: Path, server: tuple[MlflowServer, str]) -> None:
    made, url = server
    metrics, told = tmp_path / "metrics.jsonl", list[str]()
    job = job_of(tmp_path, "track=mlflow", f"track.url={url}")
    with MetricsLog(metrics) as log, tracking(job, metrics, LAST, RecordingReporter(told)):
        write(log, 1, 10)
        log.append(b"\xff garbage\n[1]\n" + bytes(9) + b"\n")
        write(log, 11, LAST)
    assert made.rows() == expected()
    assert told == []


@pytest.mark.parametrize(
    "content", ["", "null", "[]", "{}", '{"token": "x", "steps": 3}', '{"token": "x", "steps": {"a": "b"}}']
)
def test_a_damaged_cursor_is_reported_and_written_again(tmp_path: Path, content: str) -> None:
    path, told = tmp_path / "tracked.json", list[str]()
    path.write_text(content)
    made = forwarder.Cursor(path, RecordingReporter(told))
    assert (len(made.token), made.step("mlflow"), len(told)) == (32, 0, 1)
    assert forwarder.Cursor(path, RecordingReporter(told)).token == made.token
    assert len(told) == 1
