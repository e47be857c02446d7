"""A whole search with real compilers over a tiny space, and the same question again from the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.config.load import load

pytestmark = pytest.mark.aot

ROOT = Path(__file__).resolve().parents[2]
JOB = """
model: {layers: 2, embed: 256, heads: 4, vocab: 512, tied: true}
data: text
sequence: 256
batch: 1
steps: 100000000
checkpoint: {every: 100000000}
"""
SEARCH = """
import sys
from forerun.config.load import load
from forerun.planner.search.search import run_search
from forerun.resolve.resolved_job import ResolvedJob
code = run_search(ResolvedJob(load(sys.argv[1]).job), goal="cheapest", on=sys.argv[2], as_json=len(sys.argv) > 3)
assert "jax" not in sys.modules, "the compilers have processes of their own"
sys.exit(code)
"""


def python(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=1200, check=False)


def test_search_then_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(JOB)
    first = python(tmp_path, "-c", SEARCH, "tiny.yaml", "v5e-1")
    assert first.returncode == 0, first.stderr
    asked = len(first.stderr.splitlines())
    assert all(re.match(r"\[\d+, about \d+ more", line) for line in first.stderr.splitlines()), first.stderr
    assert f"6 candidates: {asked} compiled (0 of them do not fit)" in first.stdout
    seconds = [float(found) for found in re.findall(r": ([\d.e-]+) s a step after", first.stderr)]
    written = tmp_path / "tiny.cheapest.yaml"
    best = re.search(r"# Predicted: ([\d.]+) ms a step", written.read_text())
    assert best
    assert float(best[1]) / 1e3 == pytest.approx(min(seconds), rel=0.04)

    again = python(tmp_path, "-c", SEARCH, "tiny.yaml", "v5e-1")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"0 compiled, {asked} from the cache" in again.stdout
    rows = [line for line in first.stdout.splitlines() if "v5e-1 " in line]
    assert [line for line in again.stdout.splitlines() if "v5e-1 " in line] == rows

    program = re.search(r"program ([0-9a-f]{12})", written.read_text())
    assert program
    planned = python(tmp_path, "-m", "forerun", "plan", written, "--on", "v5e-1", "--json")
    assert f'"program": "{program[1]}"' in planned.stdout, planned.stderr
    assert load(written).job.batch == 1


def test_search_over_a_tpu_and_a_gpu(tmp_path: Path) -> None:
    """Both compilers answer, and the written job is the program that was compiled for the winner."""
    (tmp_path / "tiny.yaml").write_text(JOB + "remat: {policy: none}\n")
    ran = python(tmp_path, "-c", SEARCH, "tiny.yaml", "v5e-1,h100-1", "--json")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["candidates"] == 12
    assert {plan["slice"] for plan in answer["plans"]} == {"v5e-1", "h100-1"}
    dollars = [plan["cost_usd"]["on_demand"] for plan in answer["plans"]]
    assert dollars == sorted(dollars)
    best = answer["plans"][0]
    planned = python(tmp_path, "-m", "forerun", "plan", answer["written"], "--on", best["slice"], "--json")
    [again] = json.loads(planned.stdout)["slices"]
    assert (again["program"], again["step_seconds"]) == (best["program"], best["step_seconds"])
