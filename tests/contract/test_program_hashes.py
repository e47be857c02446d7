"""The programs of a few jobs are the recorded ones. `bench/program_hashes.py` compares all jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "program_hashes.json"
SCRIPT = ROOT / "bench" / "program_hashes.py"
# A decoder, adapters, rounded weights, and a model that the job's folder contains.
SAMPLE = ("quickstart/job.yaml", "lora/job.yaml", "qat/job.yaml", "recurrent_depth/job.yaml")


@pytest.mark.skipif(jax.__version__ not in json.loads(RECORD.read_text()), reason="no hashes for this jax release")
def test_programs_of_a_few_examples_are_the_recorded_ones() -> None:
    words = [word for name in SAMPLE for word in ("--only", f"examples/{name}")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--on", "cpu-8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SAMPLE)} hashes are as recorded" in done.stdout


def test_every_job_file_has_a_recorded_hash() -> None:
    """A new job file is recorded with `python bench/program_hashes.py --write --only NAME`."""
    files = [file for folder in ("examples", "bench") for file in (ROOT / folder).rglob("*.yaml")]
    names = {file.relative_to(ROOT).as_posix() for file in files if "runs" not in file.relative_to(ROOT).parts}
    for recorded in json.loads(RECORD.read_text()).values():
        assert names <= recorded.keys()
