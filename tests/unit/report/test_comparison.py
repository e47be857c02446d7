"""Comparisons of runs: results, curves, and the keys of the jobs that differ."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from error_assertions import assert_error
from rich.console import Console
from run_records import JOB, PageContent, metrics_rows, write_run

from forerun.errors import UserError
from forerun.report.comparison import Comparison, compare_records, comparison_page
from forerun.report.run_record import read_run
from forerun.report.terminal import print_comparison


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    slow = write_run(tmp_path / "slow", metrics_rows(), summary={"steps": 20})
    fast = write_run(tmp_path / "fast", metrics_rows(drop=0.2), job=JOB + "optimizer: {lr: 1e-2}\nlora: {rank: 4}\n")
    return compare_records([read_run(slow), read_run(fast)])


def test_only_differing_keys_are_listed(comparison: Comparison) -> None:
    found = dict(comparison.differences)
    assert found["optimizer.lr"] == ["0.0003", "0.01"]
    assert found["lora.rank"] == ["–", "4"]
    assert not {"name", "runs", "steps", "model.layers"} & found.keys()


def test_the_best_run_has_the_lowest_validation_loss(comparison: Comparison) -> None:
    assert comparison.metric == "validation_loss"
    assert comparison.best == 1
    assert [row["best validation"] for row in comparison.rows] == ["3.5000 at 20", "1.5000 at 20"]


def test_without_validation_in_each_run_the_loss_decides(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 2.0}]
    runs = [write_run(tmp_path / "one", metrics_rows()), write_run(tmp_path / "two", rows)]
    found = compare_records([read_run(run) for run in runs])
    assert (found.metric, found.best) == ("loss", 1)


def test_the_page_has_the_curves_of_all_runs(comparison: Comparison) -> None:
    found = PageContent(comparison_page(comparison))
    curves = found.curves("Loss")
    assert curves["slow"][-1] == pytest.approx((20, 3.0), abs=1e-3)
    assert curves["fast"][-1] == pytest.approx((20, 1.0), abs=1e-3)
    assert ["optimizer.lr", "0.0003", "0.01"] in found.rows


def test_runs_of_the_same_name_have_different_names(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / part / "run", metrics_rows()) for part in "ab")
    found = compare_records([read_run(one), read_run(two), read_run(one)])
    assert found.names == [f"{one} (1)", str(two), f"{one} (3)"]
    assert found.differences == []


@pytest.mark.parametrize("count", [0, 1])
def test_one_run_cannot_be_compared(tmp_path: Path, count: int) -> None:
    runs = [read_run(write_run(tmp_path / "one", metrics_rows()))][:count]
    with pytest.raises(UserError) as error:
        compare_records(runs)
    assert_error(error.value, "E-REPORT-002", why=str(count) if count else "no run")


DPO = "preferences: {loss: dpo, beta: 0.1}\n"


@pytest.mark.parametrize(
    ("one", "two", "keys"),
    [
        ("", "objective: {name: 'losses:Focal'}\n", "objective.name"),
        (DPO, "preferences: {loss: dpo, beta: 0.5}\n", "preferences.beta"),
        ("", "distil: {teacher: /t}\n", "distil.teacher"),
        ("data: {path: /data/text, tokenizer: /t.json}\n", "data: {path: /data/text}\n", "data.tokenizer"),
        ("data: {path: /data/text}\n", "data: {path: /data/other}\n", "data.path"),
        (
            "data: {path: /data/text, validation: 0.1}\n",
            "data: {path: /data/text, validation: 0.2}\n",
            "data.validation",
        ),
        ("", "optimizer: {lr: 1e-2}\nseed: 3\nmodel: {layers: 2, embed: 16, heads: 2}\n", ""),
        ("", "distil: {teacher: /t}\noptimizer: {lr: 1e-2}\n", "distil.teacher"),
    ],
)
def test_losses_of_different_quantities_are_not_ranked(tmp_path: Path, one: str, two: str, keys: str) -> None:
    runs = []
    for name, job in (("one", one), ("two", two)):
        lines = [line for line in JOB.splitlines(True) if f"\n{line.partition(':')[0]}:" not in f"\n{job}"]
        runs.append(
            write_run(tmp_path / name, metrics_rows(drop=0.1 if name == "one" else 0.2), job="".join(lines) + job)
        )
    found = compare_records([read_run(run) for run in runs])
    page = PageContent(comparison_page(found))
    assert [row["final loss"] for row in found.rows] == ["3.0000", "1.0000"]
    if keys:
        assert found.best is None
        assert keys in found.not_ranked
        assert "optimizer.lr" not in found.not_ranked
        assert found.not_ranked in page.texts
    else:
        assert (found.best, found.not_ranked) == (1, "")
    stream = io.StringIO()
    print_comparison(Console(file=stream, width=400), found)
    assert (found.not_ranked or "two has the lowest") in stream.getvalue()
