"""The accuracy page says what the recorded predictions say, and one of them can be made again."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun.planner.compile import compiler, fork_server

ROOT = Path(__file__).resolve().parents[4]
BENCH = ROOT / "bench" / "accuracy"
PAGE = (ROOT / "docs" / "explanation" / "accuracy.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "bench" / "results" / "accuracy.jsonl").read_text().splitlines()]
COUNTED = [row for row in ROWS if row.get("half") == "development"]
SMALL = "adamh_llama_scaling/1_2b v5e-64"


MODULES = ("flags", "tpu_worker", "runs", "more_runs", "predict")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/accuracy/runs.py, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:  # tests of faults have modules of these names, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    import runs

    yield runs
    for name in MODULES:
        sys.modules.pop(name, None)


def test_enough_runs_of_enough_generations() -> None:
    assert len(COUNTED) >= 30
    assert len({row["generation"] for row in COUNTED}) >= 4
    assert any(not row["mesh"].endswith("x1") for row in COUNTED), "tensor parallel ones are among them"


def test_no_development_run_is_of_a_sealed_family(bench: ModuleType) -> None:
    import more_runs

    sealed = {run.family for run in more_runs.sealed_runs()}
    assert sealed
    assert {row["family"] for row in COUNTED} & sealed == set()
    assert {row["name"] for row in COUNTED} <= {run.name for run in bench.runs() if not run.unlike}


def test_recorded_rows_are_the_published_runs(bench: ModuleType) -> None:
    published = {run.name: run.seconds for run in bench.runs()}
    assert {row["name"] for row in ROWS} <= set(published)
    for row in COUNTED:
        assert row["published_seconds"] == pytest.approx(published[row["name"]])
        assert row["error"] == pytest.approx(row["seconds"] / row["published_seconds"] - 1)
        assert row["low_seconds"] < row["seconds"] < row["high_seconds"]
        assert sum(row["parts_seconds"].values()) == pytest.approx(row["seconds"])


def test_the_page_sums_up_what_was_recorded() -> None:
    errors = [abs(row["seconds"] / row["published_seconds"] - 1) for row in COUNTED]
    covered = [row["low_seconds"] <= row["published_seconds"] <= row["high_seconds"] for row in COUNTED]
    within = sum(error <= 0.2 for error in errors) / len(errors)
    line = (
        f"| development | all | {len(COUNTED)} | {statistics.median(errors):.1%} | {within:.0%} | {max(errors):.1%} "
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
    """MaxText's scale rule of 2023, against the billions that its names promise. The MLP has two matrices."""
    for run in bench.maxtext_defaults():
        model: dict[str, Any] = run.job["model"]
        layer = model["embed"] * (4 * model["heads"] * model["head_dim"] + 2 * model["mlp"])
        billions = (model["layers"] * layer + model["vocab"] * model["embed"]) / 1e9
        assert billions == pytest.approx(float(run.name.split("-")[1].split("b")[0]), rel=0.025)


@pytest.mark.aot
def test_a_small_run_is_predicted_again(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import predict

    run = next(run for run in bench.runs() if run.name == SMALL)
    row = next(row for row in ROWS if row["job"] == predict.job_hash(run))
    monkeypatch.setattr(predict, "CACHE", tmp_path)
    monkeypatch.setattr(compiler, "parse", predict._keep_scheduled)
    for module, name in ((fork_server, "COMMAND"), (compiler, "_environment")):
        monkeypatch.setattr(module, name, getattr(module, name))  # what `use_own_server` replaces is restored
    predict.use_own_server()
    assert predict.predict(run)["seconds"] == pytest.approx(row["seconds"], rel=0.02)
