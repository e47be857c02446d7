"""`forerun report` and `forerun compare`: output, files and exit codes. The API returns the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_records import JOB, PageContent, metrics_rows, write_run

import forerun as fr
from forerun.cli.main import main
from forerun.exit_codes import USER_MISTAKE


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    one = write_run(tmp_path / "one", metrics_rows(), summary={"steps": 20})
    two = write_run(tmp_path / "two", metrics_rows(drop=0.2), job=JOB + "seed: 7\n")
    return str(one), str(two)


def test_report_prints_and_writes_a_page(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    assert main(["report", runs[0], "--html", str(file)]) == 0
    output = capsys.readouterr().out
    assert "3.0000" in output
    assert str(file) in output
    assert "3.0000" in PageContent(file.read_text()).texts


def test_compare_prints_and_writes_a_page(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    assert main(["compare", *runs, "--html", str(file)]) == 0
    assert ["seed", "0", "7"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "0", "7"] in PageContent(file.read_text()).rows


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["report", "{folder}"], "E-RUN-020"),
        (["compare", "{run}"], "E-REPORT-002"),
        (["compare", "{run}", "{folder}"], "E-RUN-020"),
        (["report", "{run}", "--html", "{folder}/missing/page.html"], "E-SYSTEM-001"),
        (["report"], "E-COMMAND-023"),
    ],
)
def test_mistakes(
    words: list[str], code: str, runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(run=runs[0], folder=tmp_path) for word in words]) == USER_MISTAKE
    assert f"[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "."], ["watch", ".", "--once"], ["report", "checkpoints/.."]])
def test_the_current_folder_may_be_the_run(
    words: list[str], runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(runs[0]) / "checkpoints").mkdir()
    monkeypatch.chdir(runs[0])
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "one" in output
    assert "finished" in output


def test_the_current_folder_may_be_that_of_stages(
    runs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "stages.json").write_text('{"stages": {"first": "one", "second": "two"}}')
    monkeypatch.chdir(tmp_path / "all")
    assert main(["report", "."]) == 0
    assert "two" in capsys.readouterr().out


def test_the_api_returns_the_report(runs: tuple[str, str], tmp_path: Path) -> None:
    report = fr.report_run(runs[0])
    assert report.status == "finished"
    assert report.record.points("loss")[-1] == (20, pytest.approx(3.0))
    assert "3.0000" in PageContent(report.html()).texts
    frame = PageContent(report._repr_html_())
    assert [(tag, "sandbox" in a) for tag, a in frame.tags] == [("iframe", True)]
    assert "3.0000" in str(report)
    report.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_the_api_returns_the_comparison(runs: tuple[str, str]) -> None:
    found = fr.compare_runs(*runs)
    assert found.differences == {"seed": ["0", "7"]}
    assert [row["final loss"] for row in found.table] == ["3.0000", "1.0000"]
    assert [record.name for record in found.records] == ["one", "two"]
    assert "iframe" in found._repr_html_()
