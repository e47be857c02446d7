"""`forerun run` before it rents anything: options, cap, bucket, and the requests of a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import raises_error
from simulated_cloud import START, SimulatedCloud, SimulatedProvider

from forerun.cli.cloud.run import _shortened, file_summary
from forerun.cli.cloud.run_outline import RunOptions, outline
from forerun.cli.commands import parser_of
from forerun.cli.main import main
from forerun.cloud.provider import CloudUnavailable, SliceRequest
from forerun.cloud.record.entries import AttemptEntry, CloudRun, EndEntry
from forerun.cloud.setup.job_files import job_files
from forerun.errors import UserError
from forerun.planner.compile.installed_compilers import InstalledCompiler
from forerun.verbs.job_files import open_job

JOB = """\
name: tiny
model: {layers: 1, embed: 16, heads: 2}
data: text
sequence: 16
batch: 8
steps: 6
device: cpu
"""
BUCKET = ["--bucket", "gs://bucket/runs"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tale.txt").write_text("It was the best of times. " * 100)
    (tmp_path / "tiny.yaml").write_text(JOB)
    return tmp_path / "tiny.yaml"


def outlined(job: Path, *words: str) -> CloudRun:
    values = vars(parser_of("run").parse_args([str(job), *words]))
    path, overrides = values.pop("job"), values.pop("overrides")
    return outline(RunOptions(**values), open_job(path, overrides), overrides)


def test_the_record_has_what_the_user_asked_for(job: Path) -> None:
    words = [
        "seed=3",
        *BUCKET,
        "--on",
        "v5e-16",
        "--or",
        "v6e-8",
        "--spot",
        "--zones",
        "us-central1-a",
        "--max-usd",
        "7",
    ]
    words += ["--zones", "us-central1-a", "--disk-gib", "200", "--network", "lab", "--internal-ips"]
    run = outlined(job, *words, "--wait-seconds", "90")
    assert (run.name, run.folder, run.device) == ("tiny", "gs://bucket/runs/tiny", "cpu")
    assert (run.job, run.arguments, run.total_steps) == (JOB, ("seed=3",), 6)
    assert [(one.slice, one.zone, one.capacity, one.hosts) for one in run.options] == [
        ("v5e-16", "us-central1-a", "spot", 4),
        ("v6e-8", "us-central1-a", "spot", 1),
    ]
    assert (run.max_usd, run.disk_gib, run.network, run.internal_only, run.wait_seconds) == (7.0, 200, "lab", True, 90)
    assert run.versions["python"].startswith("3.")
    assert not run.keeper
    assert run.export


def test_a_bucket_of_the_job_is_used(job: Path) -> None:
    run = outlined(job, "checkpoint.folder=gs://own/place/", "--on", "v5e-4", "--max-usd", "3")
    assert run.folder == "gs://own/place/tiny"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--on", "v5e-8", "--max-usd", "5"], "E-CLOUD-054"),
        (["--on", "v5e-8", "--max-usd", "5", "--bucket", "runs"], "E-CLOUD-054"),
        ([*BUCKET, "--max-usd", "5"], "E-CLOUD-056"),
        ([*BUCKET, "--on", "v5e-8"], "E-CLOUD-059"),
        ([*BUCKET, "--on", "v5e-8", "--max-usd", "0.01"], "E-CLOUD-060"),
        ([*BUCKET, "--on", "v5e-9", "--max-usd", "5"], "E-HARDWARE-019"),
        ([*BUCKET, "--on", "v5e-8", "--zones", "mars-1", "--max-usd", "5"], "E-CLOUD-053"),
        (["device=gpu", *BUCKET, "--on", "4090-1", "--max-usd", "5"], "E-CLOUD-020"),
        (["device=gpu", *BUCKET, "--on", "h100-8x2", "--max-usd", "5"], "E-CLOUD-020"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_rented(job: Path, words: list[str], code: str) -> None:
    with pytest.raises(UserError) as raised:
        outlined(job, *words)
    assert raised.value.code == code


@pytest.mark.parametrize("name", ["h100-8", "a3-highgpu-8g"])
def test_a_gpu_machine_is_rented_with_its_plan(job: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[object] = []
    row = {
        "hours": 3.0,
        "step_seconds": {"low": 0.4, "mid": 0.5, "high": 0.6},
        "spot": {"overhead": 0.5, "preemptions": 1.0},
        "program": "abc",
    }

    def planned(args: object, loaded: object, names: list[str]) -> tuple[dict[str, object], int]:
        asked.extend(names)
        return {"h100-8": row}, 6

    monkeypatch.setattr("forerun.cli.cloud.run_outline._planned", planned)
    monkeypatch.setattr(InstalledCompiler, "require", lambda compiler: None)
    run = outlined(job, "device=gpu", *BUCKET, "--on", name, "--zones", "us-central1-a")
    assert asked == ["h100-8"]
    assert [(one.provider, one.slice, one.hours, one.program) for one in run.options] == [
        ("compute", "a3-highgpu-8g", 3.0, "abc")
    ]
    # Twice the planned cost: 2 x 3 h x $87.8325.
    assert (run.device, run.max_usd) == ("gpu", 527.0)


def test_without_the_gpu_compiler_a_gpu_machine_needs_a_cap(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(compiler: InstalledCompiler) -> None:
        raise UserError("E-PLAN-004", "not installed", why="", fix="install it")

    monkeypatch.setattr(InstalledCompiler, "require", missing)
    words = ["device=gpu", *BUCKET, "--on", "h100-8"]
    with raises_error("E-CLOUD-059"):
        outlined(job, *words)
    run = outlined(job, *words, "--max-usd", "200")
    assert {one.slice for one in run.options} == {"a3-highgpu-8g"}
    assert run.options[0].hours is None


def test_the_startup_script_is_printed_without_credentials(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(job), *BUCKET, "--on", "v5e-8", "--max-usd", "5", "--print-startup"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


def test_a_dry_run_shortens_long_texts() -> None:
    assert _shortened({"a": ["x" * 500, "b"], "c": 1}) == {"a": ["<500 characters: see --print-startup>", "b"], "c": 1}


def test_the_files_that_travel_are_listed_without_a_plan(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (".env", "id_rsa", *(f"{number}.txt" for number in range(8))):
        (job.parent / "text" / name).write_text("private")
    (job.parent / "text" / "b\nskipped: no.txt").write_text("x")
    assert main(["run", str(job), "--list-files"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    sent = ["job.yaml", *(f"text/{number}.txt" for number in range(8)), r'"text/b\nskipped: no.txt"', "text/tale.txt"]
    assert names[:11] == sent
    assert [line.split(" (")[0] for line in lines[11:13]] == ["skipped: text/.env", "skipped: text/id_rsa"]
    local = job_files(JOB, job.parent, (), "/job")
    summary = file_summary(local)
    assert "2.59 KiB: text/0.txt" in summary
    assert "skipped: text/.env, text/id_rsa" in summary
    assert "\n" not in summary


class Limited(SimulatedProvider):
    """An API that has a limit for flex-start only."""

    def enforces_limit(self, request: SliceRequest) -> bool:
        return request.capacity == "flex-start"


def asked(
    cloud: SimulatedCloud, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[str, str]:
    """Run `forerun run` up to its question, which gets the answer no. Return what is printed, and the question."""
    questions = []

    def agrees(question: str, *, yes: bool) -> bool:
        questions.append(question)
        return False

    monkeypatch.setenv("XDG_CONFIG_HOME", str(job.parent / "config"))
    monkeypatch.setattr("forerun.cli.cloud.run.agrees", agrees)
    monkeypatch.setattr("forerun.cloud.providers.provider_named", lambda name, project: Limited(cloud))
    monkeypatch.setattr("forerun.cloud.record.run_files.RunFiles", lambda folder: cloud.files())
    assert main(["run", str(job), *BUCKET, "--on", "v5e-8", *words]) == 1
    (question,) = questions
    return capsys.readouterr().out, question


def test_the_question_of_a_resumed_run_names_the_cap_that_holds(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = SimulatedCloud({})
    recorded = outlined(job, *BUCKET, "--on", "v5e-8", "--max-usd", "500")
    files = cloud.files()
    files.create_run(recorded)
    files.create_attempt(AttemptEntry(1, recorded.options[0], "forerun-tiny-1", START, 3600, 0.0))
    files.create_end(1, EndEntry(START, "preempted", 3.25))
    before = dict(cloud.contents)
    # Without --max-usd, a planned job has a cap of its own, twice the planned cost.
    monkeypatch.setattr("forerun.cli.cloud.run_outline._cap", lambda args, options: args.max_usd or 20.0)
    _, question = asked(cloud, job, monkeypatch, capsys)
    assert "$500.00" in question
    assert "$3.25" in question
    _, question = asked(cloud, job, monkeypatch, capsys, "--max-usd", "20")
    assert "$20.00" in question
    assert "500" not in question
    assert cloud.contents == before, "nothing changes before the answer"


@pytest.mark.parametrize("call", ["now", "list"])
def test_an_api_that_does_not_answer_at_the_beginning_is_no_bug(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    cloud = SimulatedCloud({})

    def fail(provider: object) -> None:
        raise CloudUnavailable("429")

    monkeypatch.setattr(Limited, call, fail)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(job.parent / "config"))
    monkeypatch.setattr("forerun.cloud.providers.provider_named", lambda name, project: Limited(cloud))
    monkeypatch.setattr("forerun.cloud.record.run_files.RunFiles", lambda folder: cloud.files())
    assert main(["run", str(job), *BUCKET, "--on", "v5e-8", "--max-usd", "5", "--yes"]) == 74
    assert "E-CLOUD-067" in capsys.readouterr().err
    assert cloud.contents == {}


@pytest.mark.parametrize(("words", "has_limit"), [([], False), (["--spot"], False), (["--flex-start"], True)])
def test_the_limit_of_the_api_is_printed_before_the_question(
    words: list[str],
    has_limit: bool,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed, _ = asked(SimulatedCloud({}), job, monkeypatch, capsys, "--max-usd", "20", *words)
    (line,) = [line for line in printed.splitlines() if line.strip().startswith("cloud API:")]
    assert line.split()[2].rstrip(",") == ("yes" if has_limit else "no")
