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
    "unused_published.csv": "33062bb57afea1d92864d6c470e7372224b158ca04bc5e7c09de406f6a307f54",
    "tpu_split.csv": "f44ddcb66e3ab3dda1084f3bacca022ed3ac80ff9c6704698f5e01b1089a3e6d",
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

    used, unused = runs.runs(), bench.unused_runs()
    assert {run.name for run in used} & {run.name for run in unused} == set()
    assert {run.family for run in used} & {run.family for run in unused} == set()
    assert {run.source for run in used} & {run.source for run in unused} == set()


def test_seconds_follow_from_published_rates(bench: ModuleType) -> None:
    """Llama 2 70B has 68,976,648,192 parameters, of which the norms are 161 vectors of 8,192."""
    found = {run.name: run for run in bench.unused_runs()}
    flops = 6 * (68_976_648_192 - 161 * 8192) * 512 * 1024 / 128
    assert found["llama2-70b-spmd v4-256"].seconds == pytest.approx(flops / (0.53 * 275e12))
    assert found["llama2-70b v5p-1024"].seconds == pytest.approx(4 * 4096 / 692)


def test_each_row_without_a_model_says_why(bench: ModuleType) -> None:
    for row in bench.rows():
        assert bool(row["model"]) != bool(row["unlike"]), row["name"]
        assert re.search(r"\w", row["source"]), row["name"]
