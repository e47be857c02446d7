"""The README's commands, as printed there, from the root of the repository."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.track.goodput import LOST
from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)


def commands(page: str) -> list[str]:
    return [line for block in BLOCK.findall((ROOT / page).read_text()) for line in block.splitlines()]


COMMANDS = [command for command in commands("README.md") if command.startswith("forerun ")]
CHECK = "forerun check examples/quickstart/job.yaml"
MAX_CPU_SECONDS = 2 * 180  # the README's three minutes, of two cores such as YARDSTICK takes YARDSTICK_SECONDS on
YARDSTICK_SECONDS = 1.2
YARDSTICK = """
import numpy as np
a = b = np.random.default_rng(0).standard_normal((384, 384), np.float32)
for _ in range(600):
    b = np.tanh(a @ b / 20)
total = 0
for number in range(6_000_000):
    total += number
"""
METRICS = {"step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "wait_share", "unix_seconds"}
METRICS |= {"tokens_per_second", "samples_per_second", "epoch", "epoch_seconds"}  # a CPU has no MFU and no HBM
METRICS |= {"goodput", *(f"lost_{name}" for name in LOST)}
SUMMARY = {
    "goodput",
    "name",
    "steps",
    "resumed_at",
    "first_loss",
    "final_loss",
    "validation",
    "loss_unit",
    "trainable_parameters",
    "tokens",
    "parameters",
    "step_seconds",
    "predicted_step_seconds",
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "epochs",
    "epoch_seconds",
    "hbm_peak_bytes",
    "wait_share",
    "train_seconds",
    "program",
    "compile_cached",
    "mesh",
    "device",
    "versions",
}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    cpu_seconds: float


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone's root as far as the commands see it, so that `runs/` of this one is left alone."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs"))
    return folder


def run(command: str, root: Path, shell: dict[str, str]) -> Ran:
    with (root / "out").open("wb") as out, (root / "err").open("wb") as err:
        child = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=root, env=shell, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    texts = (root / "out").read_text(), (root / "err").read_text()
    return Ran(child.returncode, *texts, usage.ru_utime + usage.ru_stime)


def slower(root: Path, shell: dict[str, str]) -> float:
    """By how much this machine is, at this moment, than the one that the README's minutes are of."""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(YARDSTICK)}"
    ran = run(command, root, {**shell, "OPENBLAS_NUM_THREADS": "1"})
    assert ran.code == 0, ran.err
    return max(1.0, ran.cpu_seconds / YARDSTICK_SECONDS)


def only(word: str) -> str:
    (command,) = [command for command in COMMANDS if command.startswith(f"forerun {word} ")]
    return command


def test_the_readme_has_nothing_that_is_not_run_here() -> None:
    assert [only("init"), only("plan"), only("train")] == COMMANDS


def test_the_quickstart_has_the_commands_of_the_readme_and_ends_with_a_report() -> None:
    found = [command for command in commands("docs/tutorials/quickstart.md") if command.startswith("forerun ")]
    assert found == [CHECK, only("plan"), only("train"), "forerun report runs/quickstart --html report.html"]


def test_init(root: Path, shell: dict[str, str]) -> None:
    ran = run(only("init"), root, shell)
    assert ran.code == 0, ran.err
    assert "lora:" in (root / only("init").split()[-1]).read_text()


def test_check(root: Path, shell: dict[str, str]) -> None:
    ran = run(CHECK, root, shell)
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^\s*optimizer\.lr\s+0\.004\s+job\.yaml:\d+$", ran.out, re.M)
    assert re.search(r"^\s*tokens per step\s+2\.05k\s", ran.out, re.M)


@pytest.mark.aot
def test_plan(root: Path, shell: dict[str, str]) -> None:
    ran = run(only("plan"), root, shell)
    assert ran.code == 0, ran.err
    for name in ("v6e-1", "h100-1"):
        assert re.search(rf"^\s*{name}\s.*\syes\s", ran.out, re.M), ran.out


def test_the_example_of_the_page_on_training(root: Path, shell: dict[str, str]) -> None:
    (command,) = commands("docs/how-to/train.md")
    ran = run(command, root, shell)
    assert ran.code == 0, ran.err
    assert {path.name for path in (root / "runs" / "short").iterdir()} == {
        "job.yaml",
        "metrics.jsonl",
        "summary.json",
        "events.jsonl",
        "program.json",
        "report.html",
        "checkpoints",
    }
    assert len(read_metrics(root / "runs" / "short" / "metrics.jsonl")) == 20


def test_the_pages_explain_every_figure() -> None:
    explained = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "train-details.md").read_text()))
    assert explained >= METRICS | SUMMARY


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_train(root: Path, shell: dict[str, str]) -> None:
    """In CPU seconds, beside those of work that is always the same: this machine may be slow, and others may use it."""
    before = slower(root, shell)
    ran = run(only("train"), root, shell)
    assert ran.code == 0, ran.err
    assert ran.cpu_seconds < MAX_CPU_SECONDS * max(before, slower(root, shell))
    folder = root / "runs" / "quickstart"

    metrics = read_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY
    assert [row["step"] for row in metrics] == list(range(1, summary["steps"] + 1))
    assert all(set(row) == METRICS for row in metrics)
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert metrics[0]["loss"] == summary["first_loss"] > 5
    assert metrics[-1]["loss"] == summary["final_loss"] < 2.5

    sample = ran.out.partition("\nsample:\n")[2]
    assert sample.startswith("Alice ")
    assert len(sample) > 100
