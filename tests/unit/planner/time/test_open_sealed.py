"""The script that opens the sealed runs: its figures, its table, and that it opens them only once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[4] / "bench" / "accuracy"
MODULES = ("flags", "runs", "more_runs", "tpu_worker", "predict", "evaluate", "report", "compile_unused", "open_sealed")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """bench/accuracy/open_sealed.py with its own results file and page."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import open_sealed

    page = tmp_path / "accuracy.md"
    blocks = "".join(f"<!-- {name} -->\n<!-- end {name} -->\n" for name in ("sealed summary", "sealed"))
    page.write_text(blocks)
    monkeypatch.setattr(open_sealed, "RESULTS", tmp_path / "sealed.jsonl")
    monkeypatch.setattr(open_sealed.report, "PAGE", page)
    yield open_sealed
    for name in MODULES:
        sys.modules.pop(name, None)


def row(published: float, predicted: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    return {
        "name": f"job-{published}",
        "generation": "v5e",
        "published_seconds": published,
        "seconds": predicted,
        "low_seconds": low,
        "high_seconds": high,
        "error": predicted / published - 1,
        "recomputed_by_compiler": 0,
        "own_options": False,
        "fits": True,
        **more,
    }


def test_the_summary_compares_the_ranges_with_a_flat_one(bench: ModuleType) -> None:
    rows = [row(1.0, 1.1, 1.0, 1.2), row(2.0, 2.0, 1.9, 2.1), row(4.0, 3.0, 2.7, 3.3)]
    found = bench.summary(rows)
    assert found["runs"] == 3
    assert found["median_error"] == pytest.approx(0.1)
    assert found["within"] == pytest.approx(2 / 3)
    assert found["worst_error"] == pytest.approx(0.25)
    assert found["covered"] == pytest.approx(2 / 3)
    assert found["width"] == pytest.approx((0.2 / 1.1 + 0.1 + 0.2) / 3)
    assert found["flat_covered"] == pytest.approx(2 / 3), "4.0 is 33 % above 3.0"


def test_the_table_marks_runs_and_lists_those_without_a_prediction(bench: ModuleType) -> None:
    rows = [
        row(2.0, 1.0, 0.5, 1.5, recomputed_by_compiler=3, own_options=True),
        {"name": "large", "generation": "v4", "fits": False, "reason": "does not fit: 40.0 GiB"},
    ]
    text = bench.table(rows)
    assert "| job-2.0 \\* † | 2.000 | 1.000 | -50.0% | 0.500 to 1.500 |" in text
    assert "fit: 40.0 GiB" in text


def test_the_runs_are_opened_once(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "sealed_runs", lambda: ["a"])
    monkeypatch.setattr(bench, "result", lambda run: row(2.0, 2.0, 1.9, 2.1))
    assert bench.main([]) == 0
    first = bench.RESULTS.read_text()
    assert json.loads(first)["opening"] == 1
    assert "opened once" in bench.report.PAGE.read_text()
    monkeypatch.setattr(bench, "result", lambda run: row(2.0, 1.0, 0.9, 1.1))
    assert bench.main([]) == 1
    assert bench.RESULTS.read_text() == first
    assert bench.main(["--again"]) == 0
    assert [json.loads(line)["opening"] for line in bench.RESULTS.read_text().splitlines()] == [1, 2]
    page = bench.report.PAGE.read_text()
    assert "opened 2 times" in page
    assert "| job-2.0 | 2.000 | 1.000 | -50.0% | 0.900 to 1.100 |" in page


def test_a_dry_run_predicts_development_runs_only(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def result(run: Any) -> dict[str, Any]:
        asked.append(run.name)
        return row(2.0, 2.0, 1.9, 2.1)

    monkeypatch.setattr(bench, "result", result)
    monkeypatch.setattr(bench, "sealed_runs", lambda: pytest.fail("a dry run must not look at sealed runs"))
    assert bench.main(["--development"]) == 0
    assert asked == [run.name for run in bench.development_runs()]
    assert not bench.RESULTS.exists()
    assert "| job-2.0 |" in capsys.readouterr().out
