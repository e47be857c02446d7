from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error
from recording_reporter import RecordingReporter

from forerun.checkpoint.store import CheckpointStore
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.run import train as loop
from forerun.run_folder.open_folder import open_folder

MakeJob = Callable[..., Job]


def test_the_same_job_comes_back_to_its_folder(make_job: MakeJob) -> None:
    first = open_folder(make_job(), fresh=False)
    (first.path / "metrics.jsonl").write_text("kept\n")
    again = open_folder(make_job(), fresh=False)
    assert again == first
    assert again.metrics.read_text() == "kept\n"
    assert load(again.job).job == make_job()


def test_another_job_is_refused_with_what_differs(make_job: MakeJob) -> None:
    folder = open_folder(make_job(), fresh=False)
    with pytest.raises(UserError) as refused:
        open_folder(make_job("optimizer.lr=0.5", "seed=7", "mesh.data=2"), fresh=False)
    assert str(folder.path) in refused.value.what
    assert refused.value.why.splitlines()[1:] == ["optimizer.lr: 0.01 there, 0.5 here", "seed: 0 there, 7 here"]
    assert "--fresh" in refused.value.fix
    assert load(folder.job).job == make_job(), "a refused job leaves the folder as it was"


@pytest.mark.parametrize(
    "override",
    ["mesh.data=2", "devices=4", "device=auto", "log_every=5", "checkpoint.every=1", "sample.tokens=3", "steps=7"],
)
def test_where_it_runs_and_what_is_told_may_change(make_job: MakeJob, override: str) -> None:
    open_folder(make_job(), fresh=False)
    folder = open_folder(make_job(override), fresh=False)
    assert load(folder.job).job == make_job(override)


@pytest.mark.parametrize("feeders", [0, 2])
def test_a_run_that_was_saved_with_feeders_resumes_without(make_job: MakeJob, feeders: int) -> None:
    """Earlier versions wrote `data.feeders` to every `job.yaml` and into the record of every checkpoint."""
    folder = open_folder(make_job(f"data.feeders={feeders}"), fresh=False)
    assert f"feeders: {feeders}\n" in folder.job.read_text()
    with CheckpointStore(folder.path / "checkpoints", keep=1) as store:
        store.save(1, {"x": np.zeros(1)}, {"job": make_job(f"data.feeders={feeders}").model_dump(mode="json")})
    assert open_folder(make_job(), fresh=False) == folder


@pytest.mark.parametrize(
    "override", ["batch=4", "sequence=8", "model.embed=32", "data.tokenizer=other.json", "optimizer.warmup=2"]
)
def test_what_is_computed_may_not_change(make_job: MakeJob, override: str) -> None:
    open_folder(make_job(), fresh=False)
    with raises_error("E-RUN-027"):
        open_folder(make_job(override), fresh=False)


def test_fresh_keeps_what_was_there_under_another_name(make_job: MakeJob) -> None:
    for number in (1, 2, 3):
        folder = open_folder(make_job(f"seed={number}"), fresh=True)
        (folder.path / "mark").write_text(str(number))
    runs = folder.path.parent
    kept = {path.name: (path / "mark").read_text() for path in runs.iterdir()}
    assert kept == {"tiny.old-1": "1", "tiny.old-2": "2", "tiny": "3"}


def test_checkpoints_elsewhere_have_a_folder_of_the_runs_name_and_are_not_set_aside(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(f"checkpoint.folder={tmp_path}/shared/")
    folder = open_folder(job, fresh=True)
    assert folder.checkpoints(job) == f"{tmp_path}/shared/tiny"
    assert folder.checkpoints(make_job()) == folder.path / "checkpoints"
    with CheckpointStore(folder.checkpoints(job), keep=1):
        pass
    with raises_error("E-RUN-025", "--fresh"):
        open_folder(job, fresh=True)
    assert folder.job.exists(), "what was refused has moved nothing"


def test_only_one_host_writes_the_folder(make_job: MakeJob) -> None:
    assert not open_folder(make_job(), fresh=True, writes=False).path.exists()


@pytest.mark.parametrize("content", [b"", bytes(700), b"\n"])
def test_an_empty_job_without_a_checkpoint_is_written_again(make_job: MakeJob, content: bytes) -> None:
    """A power loss can leave such a file."""
    folder, told = open_folder(make_job(), fresh=False), list[str]()
    folder.job.write_bytes(content)
    assert load(open_folder(make_job(), fresh=False, reporter=RecordingReporter(told)).job).job == make_job()
    assert len(told) == 1
    assert str(folder.job) in told[0]


@pytest.mark.parametrize("record", [{"data": "without a job"}, {"job": {"model": 3, "of tomorrow": 1}}])
def test_a_recorded_job_that_this_version_cannot_read_is_refused(make_job: MakeJob, record: dict[str, object]) -> None:
    folder = open_folder(make_job(), fresh=False)
    with CheckpointStore(folder.checkpoints(make_job()), keep=1) as store:
        store.save(2, {"weights": np.zeros(3, np.float32)}, record)
    with raises_error("E-RUN-026"):
        open_folder(make_job(), fresh=False)


def test_fresh_does_not_compare(make_job: MakeJob) -> None:
    folder = open_folder(make_job(), fresh=False)
    with CheckpointStore(folder.checkpoints(make_job()), keep=1) as store:
        store.save(2, {"weights": np.zeros(3, np.float32)}, {"job": make_job().model_dump(mode="json")})
    with raises_error("E-RUN-027"):
        open_folder(make_job("seed=7"), fresh=False)
    assert load(open_folder(make_job("seed=7"), fresh=True).job).job.seed == 7


@pytest.mark.parametrize("key", ["runs", "checkpoint.folder"])
def test_a_folder_that_cannot_be_used_is_found_before_the_data_is_read(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(loop, "open_corpus_with_progress", lambda *given: pytest.fail("the data was read"))
    with pytest.raises(UserError, match=key):
        loop.train(make_job(f"{key}={tmp_path / 'file'}"), LineReporter(io.StringIO(), clock=time.monotonic))
