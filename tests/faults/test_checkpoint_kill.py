from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timing

SCRIPT = Path(__file__).resolve().parent / "checkpoint_kill.py"


def lines(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own, which forks: it must have run nothing on a device."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_killed_at_random_moments_of_saving() -> None:
    *kills, summary = lines("random", "10")
    assert (len(kills), summary["survived"]) == (10, 10)
    assert summary["inside_a_save"] >= 5, "of every second it is made sure"
    assert kills[-1]["restored"] >= 8, "every third process commits two steps"


@pytest.fixture
def _strace() -> None:
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is missing, and CI must not skip this", pytrace=False)
        pytest.skip("needs strace")


@pytest.mark.usefixtures("_strace")
def test_killed_at_the_system_calls_that_make_a_checkpoint_count() -> None:
    *kills, summary = lines("syscalls", "rename", "link")
    assert summary["survived"] == len(kills) >= 2
    assert {kill["call"] for kill in kills} == {"rename", "link"}


@pytest.mark.usefixtures("_strace")
def test_calls_that_fail_lose_nothing_and_are_told() -> None:
    *failures, summary = lines("errors", "writev", "rename", "link", "unlink")
    assert summary["survived"] == len(failures) == 14
    assert {failure["call"] for failure in failures if failure["told"]} >= {"writev", "rename", "link"}
