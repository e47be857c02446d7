"""Help and config errors answer at once: nothing heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What the answer cannot be faster than: Python itself, and the two libraries that read and check a job.
BARE = {
    "help": ["-c", "import argparse, pathlib, dataclasses"],
    "config error": ["-c", "import yaml, pydantic\nclass Bare(pydantic.BaseModel):\n    batch: int = 8"],
}
MAX_OF_BARE = 2.5
HEAVY = {"jax", "jaxlib", "numpy", "rich", "optax", "orbax", "tokenizers"}
CASES = {
    "help": (["--help"], 0, HEAVY | {"pydantic", "yaml"}),
    "help of train": (["train", "--help"], 0, HEAVY | {"pydantic", "yaml"}),
    "help of a verb": (["export", "--help"], 0, HEAVY | {"pydantic", "yaml"}),
    "help of run": (["run", "--help"], 0, HEAVY | {"pydantic", "yaml"}),
    "unknown command": (["trian"], 2, HEAVY | {"pydantic", "yaml"}),
    "config error": (["check", "job.yaml"], 2, HEAVY),
    "train with a config error": (["train", "job.yaml"], 2, HEAVY),
    "plan with a config error": (["plan", "job.yaml", "--on", "v5e-8"], 2, HEAVY),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed")
    (folder / "job.yaml").write_text("model: qwen3-0.6b\ndata: texts\noptimzer:\n  lr: 8e-5\nbatch: many\n")
    return folder


def command_environment(folder: Path) -> dict[str, str]:
    """As installed: with compiled bytecode, which pip writes and a test environment may forbid."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    source = os.pathsep.join(path for path in sys.path if path)
    return {**environment, "PYTHONPATH": source, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def cpu_seconds(words: list[str], folder: Path) -> float:
    """CPU time of one Python: the time a user waits on an idle machine, whatever else runs on this one."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=command_environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.timing
@pytest.mark.parametrize("case", BARE)
def test_the_answer_comes_in_time(case: str, folder: Path) -> None:
    """0.08 and 0.26 s on a slow core; as a ratio of two things run in turns, since cores differ and are shared."""
    words = ["-m", "forerun", *CASES[case][0]]
    pairs = [(cpu_seconds(words, folder), cpu_seconds(BARE[case], folder)) for _ in range(5)]
    ours, bare = (min(times) for times in zip(*pairs, strict=True))
    assert ours < MAX_OF_BARE * bare, pairs


@pytest.mark.parametrize("case", CASES)
def test_nothing_heavy_is_imported(case: str, folder: Path) -> None:
    words, code, unwanted = CASES[case]
    program = (
        "import sys; from forerun.cli.main import main; code = main(sys.argv[1:]);"
        "print('MODULES', *sys.modules); sys.exit(code)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env=command_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == code, child.stderr
    imported = set(child.stdout.rsplit("MODULES", 1)[1].split())
    assert "forerun.cli.main" in imported
    assert imported & unwanted == set()
