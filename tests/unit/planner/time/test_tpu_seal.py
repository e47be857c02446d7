"""The unused published TPU runs and their split are those that were committed before the first prediction."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[4]
BENCH = ROOT / "bench" / "accuracy"
PAGE = (ROOT / "docs" / "explanation" / "accuracy.md").read_text()
# Committed before any of these runs was predicted. The page lists every later correction with its reason.
SEALED = {
    "unused_published.csv": "018ceb4d75f210378b4b2755d17d70aa2653741289bc65bbd9852cc2e5c97fdc",
    "tpu_split.csv": "cf38feb2e59a54ace76d6cc2a6a2c856a9c6bfde5d1adf65579a41e35c104cd9",
}
MODULES = ("flags", "runs", "more_runs")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/accuracy/more_runs.py, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import more_runs

    yield more_runs
    for name in MODULES:
        sys.modules.pop(name, None)


def split_rows() -> list[dict[str, str]]:
    with (BENCH / "tpu_split.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", SEALED)
def test_the_runs_and_their_split_are_as_committed(name: str) -> None:
    digest = hashlib.sha256((BENCH / name).read_bytes()).hexdigest()
    assert digest == SEALED[name]
    assert digest in PAGE


def test_the_split_file_follows_from_the_rule_and_the_jobs(bench: ModuleType) -> None:
    assert bench.split_table() == (BENCH / "tpu_split.csv").read_text()


def test_the_hash_of_a_job_changes_with_the_job(bench: ModuleType) -> None:
    """An independent hash of one job, written out."""
    job = {
        "model": "llama3.1-8b",
        "sequence": 8192,
        "batch": 8,
        "mesh": {"data": 1, "fsdp": -1, "tp": 1},
        "remat": "full",
        "precision": {"params": "bfloat16"},
        "optimizer": {"name": "adafactor"},
        "attention": "auto",
        "unroll": True,
    }
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
    assert next(row for row in split_rows() if row["run"] == "torchprime-8b v6e-4")["job"] == digest


def test_no_family_is_on_both_sides() -> None:
    sides = defaultdict(set)
    for row in split_rows():
        sides[row["family"]].add(row["side"])
    assert {family: both for family, both in sides.items() if len(both) > 1} == {}


def test_enough_runs_of_each_generation_are_sealed() -> None:
    counts = Counter(row["generation"] for row in split_rows() if row["side"] == "sealed")
    assert counts.total() >= 20
    assert set(counts) == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert min(counts.values()) >= 2


def test_no_unused_run_is_a_development_run(bench: ModuleType) -> None:
    import runs

    used = {(run.slice, json.dumps(run.job["model"], sort_keys=True), run.job["batch"]) for run in runs.runs()}
    unused = {
        (run.slice, json.dumps(run.job["model"], sort_keys=True), run.job["batch"]) for run in bench.unused_runs()
    }
    families = {run.family for run in runs.runs()} & {run.family for run in bench.unused_runs()}
    assert families == set()
    assert used & unused == set()


def test_seconds_follow_from_published_rates(bench: ModuleType) -> None:
    """22B of March 2023: 48 layers of 4 E^2 + 8 E^2 weights and a tied vocabulary, 16 x 1024 tokens per chip."""
    found = {run.name: run for run in bench.unused_runs()}
    weights = 48 * 12 * 6144**2 + 32768 * 6144
    assert found["maxtext-22b-2023 v4-128"].seconds == pytest.approx(6 * weights * 16 * 1024 / 165e12)
    assert found["llama2-70b v5p-1024"].seconds == pytest.approx(4 * 4096 / 692)


def test_each_row_without_a_model_says_why(bench: ModuleType) -> None:
    for row in bench.rows():
        assert bool(row["model"]) != bool(row["unlike"]), row["name"]
        assert re.search(r"\w", row["source"]), row["name"]
