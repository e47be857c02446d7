"""`forerun doctor --cloud` from the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake import FakeCloud

from forerun.cli.main import main

JOB = """
name: small
model: {name: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}
data: {path: text.jsonl}
steps: 10
checkpoint: {folder: "gs://mine/runs"}
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture(autouse=True)
def environment(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cloud.set(buckets={"mine": "us-east5"}, disabled_services=[], quotas={})
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")


def test_every_problem_of_a_job_has_a_line_and_a_fix(
    cloud: FakeCloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB, encoding="utf-8")
    cloud.set(disabled_services=["tpu.googleapis.com"])
    assert main(["doctor", "--cloud", str(job), "--on", "v6e-8", "--zones", "us-east5-b"]) == 2
    lines = capsys.readouterr().out.splitlines()
    words = {tuple(line.split()[:3]) for line in lines}
    assert ("FAIL", "API", "tpu") in words
    assert ("ok", "zone", "us-east5-b") in words
    assert ("ok", "bucket", "gs://mine") in words
    assert ("ok", "boot", "disk") in words
    assert any("gcloud services enable tpu.googleapis.com" in line for line in lines)
    assert [one["method"] for one in cloud.requests() if one["path"].endswith(("nodes", "instances"))] == []


def test_without_a_job_the_project_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--cloud"])
    out = capsys.readouterr().out
    assert "permissions" in out
    assert "boot disk" not in out


@pytest.mark.parametrize("words", [["--on", "v6e-8"], ["--project", "p"], ["--cloud", "--smoke"]])
def test_options_of_the_other_kind_of_check_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert "E-CLOUD-090" in capsys.readouterr().err
