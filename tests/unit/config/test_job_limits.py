"""A job file is a regular file of limited size: nothing else is read, and nothing is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.config.load import load
from forerun.config.source import MAX_JOB_BYTES
from forerun.errors import UserError

JOB = "model: {layers: 1, embed: 32, heads: 2}\ndata: t.txt\nsequence: 64\nbatch: 4\nsteps: 2\n"
HANG_SECONDS = 120


def check(job: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forerun", "check", str(job)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_check_rejects_a_pipe_without_waiting_for_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "job.yaml"
    os.mkfifo(pipe)
    ran = check(pipe)
    assert ran.returncode == 2
    assert str(pipe) in ran.stderr


def test_check_rejects_a_device() -> None:
    ran = check("/dev/zero")
    assert ran.returncode == 2
    assert "/dev/zero" in ran.stderr


def test_a_job_of_the_largest_size_loads(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + "#" * (MAX_JOB_BYTES - len(JOB)))
    assert load(file).job.batch == 4


def test_a_larger_job_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + "#" * (MAX_JOB_BYTES - len(JOB) + 1))
    with pytest.raises(UserError) as caught:
        load(file)
    assert str(file) in caught.value.what


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{n}: 1\n" for n in range(90_000)),
        f"name: [{'1,' * 500_000}]\n",
        f"optimizer: {{{', '.join(f'lr{n}: 1' for n in range(80_000))}}}\n",
    ],
    ids=["keys", "list", "section"],
)
def test_a_job_of_very_many_values_is_rejected_before_it_is_checked(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + text)
    assert file.stat().st_size <= MAX_JOB_BYTES
    with pytest.raises(UserError) as caught:
        load(file)
    assert "mistakes" not in caught.value.what  # one error about the size, not one for each value
    assert caught.value.why.startswith(f"{file}:")
