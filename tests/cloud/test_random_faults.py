"""One trial of each campaign of random faults (bench/cloud_faults.py), with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).resolve().parents[2] / "bench" / "cloud_faults.py"


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(
    "options",
    [
        # Kills of the laptop, an agent and a trainer, and a lost answer.
        pytest.param(["--seed", "104"], id="polite"),
        pytest.param(["--seed", "2000", "--hostile"], id="hostile"),
    ],
)
def test_a_run_with_random_faults_leaks_nothing_and_keeps_its_cap(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(CAMPAIGN), "1", "--workers", "1", *options]
    command += ["--no-results", "--keep", str(tmp_path / "kept")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "PROBLEM" not in ran.stdout
