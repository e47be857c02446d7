"""Simulated cloud runs with random faults: 300 seeds of bench/cloud_simulation.py, and tests of the simulation."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.guest import GuestPlan
from simulation.reverts import reverted
from simulation.scenario import Scenario
from simulation.simulation import simulate
from simulation.training import Job

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "bench" / "cloud_simulation.py"
RESULTS = ROOT / "bench" / "results" / "cloud_simulation.jsonl"
PRICE = 36.0  # one cent per second
RECORDED_REVERTS = ("ends-from-the-record", "user-error-ends-the-controller", "resumed-cap")


def scenario(**changes: object) -> Scenario:
    """Return a run without faults on one host: 100 steps of 5 s, and a save of 5 s after every 20 steps."""
    values = {"prices": {("v6e-4", "zone-a"): PRICE}, "queue_seconds": {"zone-a": 10.0}, "cap_usd": 100.0}
    return Scenario(**values | changes)  # type: ignore[arg-type]


def digest(trace: list[str]) -> str:
    return hashlib.sha256("\n".join(trace).encode()).hexdigest()


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_invariant_is_violated(first: int) -> None:
    failed = {result.seed: result.violations for result in map(simulate, range(first, first + 50)) if result.violations}
    assert failed == {}


def test_one_seed_gives_one_trace() -> None:
    """The order of events depends neither on the process nor on the hashes of strings."""
    seeds = (3, 11, 42)
    program = (
        "import hashlib; from simulation.simulation import simulate\n"
        f"for seed in {seeds}: print(hashlib.sha256('\\n'.join(simulate(seed).trace).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "tests" / "cloud")}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first = [digest(simulate(seed).trace) for seed in seeds]
    assert [digest(simulate(seed).trace) for seed in seeds] == first
    assert ran.stdout.split() == first


def test_a_run_without_faults_costs_what_it_takes() -> None:
    """Boot 20 s, installation 30 s, tests 10 s, steps 500 s, 5 saves of 5 s, export 20 s: 605 s and some polls."""
    result = simulate(1, scenario())
    assert result.violations == []
    assert result.end == "finished"
    assert result.figures["machines"] == 1
    assert result.figures["checkpoints"] == 5
    assert 605 <= result.figures["machine_hours"] * 3600 <= 605 + 6 * 15


def test_a_cap_ends_a_run_before_it_is_reached() -> None:
    result = simulate(1, scenario(cap_usd=4.0))
    assert result.violations == []
    assert result.end == "budget"
    assert 400 - 2 * 60 - 2 * 15 <= result.figures["machine_hours"] * 3600 <= 400


def test_the_checks_see_a_machine_that_outlives_its_budget() -> None:
    """The scenario claims that agents exist, but they end, and no controller is left."""
    guest = GuestPlan(agent_dies_after=60.0, has_watch=False)
    result = simulate(1, scenario(guards=("agent",), cap_usd=4.0, guest=guest, laptop_ends=1_790_000_100.0))
    assert [text.split(" ")[1] for text in result.violations] == ["runs"]


def test_the_watch_alone_ends_a_machine() -> None:
    guest = GuestPlan(agent_dies_after=60.0)
    job = Job(10_000, 5.0, 20, 5.0)
    result = simulate(1, scenario(guards=("watch",), cap_usd=4.0, guest=guest, job=job, laptop_ends=1_790_000_100.0))
    assert result.violations == []
    assert 400 <= result.figures["machine_hours"] * 3600 <= 400 + 300 + 30


@pytest.mark.parametrize("name", RECORDED_REVERTS)
def test_a_defect_that_comes_back_is_found_by_its_recorded_seed(name: str) -> None:
    recorded = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    (seed,) = [line["first_seed"] for line in recorded if line["kind"] == "revert" and line["name"] == name]
    with reverted(name):
        assert simulate(seed).violations != []


def test_the_recorded_campaign_has_no_violation() -> None:
    recorded = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    (campaign,) = [line for line in recorded if line["kind"] == "seeds"]
    assert (campaign["first_seed"], campaign["seeds_with_violations"]) == (0, 0)
