"""The accuracy page says what the recorded predictions say, and one of them can be made again."""

from __future__ import annotations

import json
import re
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun.planner.compile import compiler

ROOT = Path(__file__).resolve().parents[4]
BENCH = ROOT / "bench" / "accuracy"
PAGE = (ROOT / "docs" / "explanation" / "accuracy.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "bench" / "results" / "accuracy.jsonl").read_text().splitlines()]
COUNTED = [row for row in ROWS if row.get("half") in ("calibration", "held-out")]
SMALL = "adamh_llama_scaling/1_2b v5e-64"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/accuracy/runs.py, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "runs", raising=False)  # tests of faults have one too
    import runs

    yield runs
    sys.modules.pop("runs", None)


def test_enough_runs_of_enough_generations() -> None:
    assert len(COUNTED) >= 30
    assert len({row["generation"] for row in COUNTED}) >= 4
    assert any(not row["mesh"].endswith("x1") for row in COUNTED), "tensor parallel ones are among them"


def test_no_family_stands_on_both_sides(bench: ModuleType) -> None:
    sides: dict[str, set[str]] = {}
    for row in COUNTED:
        sides.setdefault(row["family"], set()).add(row["half"])
    assert {family: halves for family, halves in sides.items() if len(halves) > 1} == {}
    assert {row["name"]: row["half"] for row in COUNTED} == {
        run.name: bench.halves(bench.runs())[run.family]
        for run in bench.runs()
        if run.name in {r["name"] for r in COUNTED}
    }


def test_recorded_rows_are_the_published_runs(bench: ModuleType) -> None:
    published = {run.name: run.seconds for run in bench.runs()}
    assert {row["name"] for row in ROWS} <= set(published)
    for row in COUNTED:
        assert row["published_seconds"] == pytest.approx(published[row["name"]])
        assert row["error"] == pytest.approx(row["seconds"] / row["published_seconds"] - 1)
        assert row["low_seconds"] < row["seconds"] < row["high_seconds"]
        assert sum(row["parts_seconds"].values()) == pytest.approx(row["seconds"])


@pytest.mark.parametrize("half", ["held-out", "calibration"])
def test_the_page_sums_up_what_was_recorded(half: str) -> None:
    rows = [row for row in COUNTED if row["half"] == half]
    errors = [abs(row["seconds"] / row["published_seconds"] - 1) for row in rows]
    covered = [row["low_seconds"] <= row["published_seconds"] <= row["high_seconds"] for row in rows]
    within = sum(error <= 0.2 for error in errors) / len(errors)
    line = (
        f"| {half} | all | {len(rows)} | {statistics.median(errors):.1%} | {within:.0%} | {max(errors):.1%} "
        f"| {statistics.mean(covered):.0%} |"
    )
    assert line in PAGE


def test_the_page_shows_every_run_with_its_error() -> None:
    for row in COUNTED:
        found = re.search(rf"^\| {re.escape(row['name'])}(?: \\\*)? \| (\S+) \| (\S+) \| (\S+)% \|", PAGE, re.MULTILINE)
        assert found, row["name"]
        assert [float(value) for value in found.groups()] == pytest.approx(
            [row["published_seconds"], row["seconds"], 100 * row["error"]], abs=0.051
        )


def test_default_sizes_have_the_weights_in_their_names(bench: ModuleType) -> None:
    """MaxText's scale rule, against the billions that its names promise (its 1B base has 1.1)."""
    for run in bench.maxtext_defaults():
        model: dict[str, Any] = run.job["model"]
        layer = model["embed"] * (4 * model["heads"] * model["head_dim"] + 3 * model["mlp"])
        billions = (model["layers"] * layer + 2 * model["vocab"] * model["embed"]) / 1e9
        assert billions == pytest.approx(float(run.name.split("-")[1].split("b")[0]), rel=0.05)


@pytest.mark.aot
def test_a_small_run_is_predicted_again(bench: ModuleType) -> None:
    run = next(run for run in bench.runs() if run.name == SMALL)
    row = next(row for row in ROWS if row["name"] == SMALL)
    answer = compiler.ask(run.question(), threading.Event(), lambda phase: None)
    assert answer.step is not None
    assert answer.step.mid_seconds == pytest.approx(row["seconds"], rel=0.02)
