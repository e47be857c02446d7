"""A run whose folder was moved or renamed does not start over unnoticed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from error_assertions import assert_error
from tiny_job import MakeJob

from forerun.config.load import dump, load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.run_folder.open_folder import require_run_in_place
from forerun.verbs.train import open_run, train


def write_run(job: Job) -> Path:
    """Write the folder of a run with a checkpoint."""
    folder = Path(job.runs) / job.name
    (folder / "checkpoints" / "2").mkdir(parents=True)
    (folder / "job.yaml").write_text(dump(job))
    return folder


def test_a_renamed_run_is_resumed_only_by_its_new_name(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("name=first", "steps=2", "checkpoint.every=1")
    train(job)
    (tmp_path / "runs" / "first").rename(tmp_path / "runs" / "second")
    with pytest.raises(UserError) as caught:
        train(job)
    assert_error(caught.value, "E-RUN-093", what=str(tmp_path / "runs" / "second"), fix="--fresh")
    assert not (tmp_path / "runs" / "first").exists()
    (override,) = shlex.split(caught.value.fix.partition("add ")[2].partition(",")[0])
    resumed = train(make_job(override, "steps=3", "checkpoint.every=1"))
    assert resumed.folder == tmp_path / "runs" / "second"
    assert [row["step"] for row in open_run(resumed.folder).metrics if "loss" in row] == [1, 2, 3]
    assert train(job, fresh=True).folder == tmp_path / "runs" / "first"
    train(job)  # it has checkpoints of its own now


def test_the_answer_of_the_user_decides(make_job: MakeJob) -> None:
    job, questions = make_job("name=first"), list[str]()
    other = write_run(job).rename(Path(job.runs) / "other")
    for answer in (True, False):

        def ask(question: str, answer: bool = answer) -> bool:
            questions.append(question)
            return answer

        if answer:
            require_run_in_place(job, ask=ask)
        else:
            with pytest.raises(UserError) as caught:
                require_run_in_place(job, ask=ask)
            assert_error(caught.value, "E-RUN-093", fix="name=other")
    assert len(questions) == 2
    assert all(str(other) in question for question in questions)


def test_a_job_file_in_a_moved_run_is_noticed(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("name=first")
    moved = write_run(job).rename(tmp_path / "moved")
    loaded = load(moved / "job.yaml")
    with pytest.raises(UserError) as caught:
        require_run_in_place(loaded.job, loaded.path)
    fix = caught.value.fix.partition("add ")[2].partition(", or move")[0]
    assert shlex.split(fix) == ["name=moved", f"runs={tmp_path}"]
    # Both overrides together are the run itself, and each alone is a new run.
    for overrides in (shlex.split(fix), ["name=new"], [f"runs={tmp_path / 'new'}"]):
        require_run_in_place(load(moved / "job.yaml", overrides).job, loaded.path)


@pytest.mark.parametrize("change", ["other job", "no checkpoint", "renamed by --fresh", "damaged", "own folder"])
def test_other_folders_are_no_moved_run(make_job: MakeJob, change: str) -> None:
    job = make_job("name=first")
    folder = write_run(job)
    other = folder.with_name("first.old-1" if change == "renamed by --fresh" else "other")
    if change == "own folder":
        write_run(make_job("name=second")).rename(other)
    else:
        folder.rename(other)
    if change == "other job":
        (other / "job.yaml").write_text(dump(make_job("name=second")))
    if change == "no checkpoint":
        (other / "checkpoints" / "2").rmdir()
    if change == "damaged":
        (other / "job.yaml").write_bytes(b"\0{")
    require_run_in_place(job)
