"""The commands of examples/distil, in order, with fewer steps."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/distil"
COMMANDS = re.findall(r"^    (forerun .+)$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
SMALL = "batch=4 sequence=64"
FEWER = {"train": f"steps=15 {SMALL}", "cache": SMALL}


@pytest.mark.slow
def test_the_example_from_its_teacher_to_its_student(tmp_path: Path, shell: dict[str, str]) -> None:
    for name in ("job.yaml", "teacher.yaml"):
        (tmp_path / "examples/distil").mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLE / name, tmp_path / "examples/distil" / name)
    text = tmp_path / "examples/quickstart/text/carroll-alice.txt"
    text.parent.mkdir(parents=True)
    text.write_bytes((ROOT / "examples/quickstart/text/carroll-alice.txt").read_bytes()[:20_000])
    assert [command.split()[1] for command in COMMANDS] == ["train", "export", "cache", "train", "train"]
    for command in COMMANDS[:-1]:  # the last, with the teacher in the step, is in tests/contract/test_distil_steps.py
        words = f"{command} {FEWER.get(command.split()[1], '')}"
        ran = subprocess.run(
            ["bash", "-c", words], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=1200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = read_metrics(tmp_path / "runs/distil/metrics.jsonl")
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["soft"] < 0.8 * rows[0]["soft"]
