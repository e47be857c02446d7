"""One trial of the campaign of random faults (bench/cloud_faults.py), with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).resolve().parents[2] / "bench" / "cloud_faults.py"


@pytest.mark.slow
@pytest.mark.timing
def test_a_run_with_random_faults_leaks_nothing_and_keeps_its_cap(tmp_path: Path) -> None:
    """The seed has kills of the laptop, an agent and a trainer, and a lost answer."""
    command = [sys.executable, "-P", str(CAMPAIGN), "1", "--seed", "104", "--workers", "1"]
    command += ["--no-results", "--keep", str(tmp_path / "kept")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "PROBLEM" not in ran.stdout
