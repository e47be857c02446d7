"""A fixed sample of random job files, planned without a compiler.

`python bench/random_jobs.py --no-compiler` plans more of them; `bench/results/random_plans.json` has its result.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from job_files import job_file
from job_trials import Trial, normalised, read_and_planned

CHUNKS, SEEDS_PER_CHUNK = 4, 52


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_jobs_are_planned_or_refused_with_a_fix(chunk: int, tmp_path: Path) -> None:
    seeds = range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK)
    trials = read_and_planned(seeds, tmp_path, Trial.run)
    assert all(trial.planned or trial.refusals for trial in trials)


def test_the_files_are_many_and_various(tmp_path: Path) -> None:
    """So that the two hundred cannot become two hundred times the same."""
    trials = read_and_planned(range(CHUNKS * SEEDS_PER_CHUNK), tmp_path, Trial.asked)
    texts = {normalised(error) for trial in trials for error in trial.refusals}
    assert sum(trial.job is not None for trial in trials) >= 80
    assert sum(trial.planned for trial in trials) >= 60
    assert sum(not trial.planned for trial in trials) >= 40
    assert sum(not trial.file.mistakes for trial in trials) >= 100
    assert len(texts) >= 25
    assert len({trial.file.text for trial in trials}) >= 190


def test_a_seed_is_a_file_in_every_process() -> None:
    here = [job_file(seed) for seed in range(20)]
    code = "from job_files import job_file; print([job_file(seed) for seed in range(20)])"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env["PYTHONIOENCODING"] = "utf-8"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=env, check=True)
    assert done.stdout.strip() == repr(here)
