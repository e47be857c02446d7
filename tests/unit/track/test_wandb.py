"""Read the last step of wandb's offline files. wandb itself writes the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.track.backends.wandb import BLOCK_BYTES, TAIL_BLOCKS, last_step

ROWS = 40
WRITE = f"""
import wandb
settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
run = wandb.init(mode="offline", id="abc", dir=".", settings=settings)
for step in range(1, {ROWS} + 1):
    run.log({{"text": f"{{step}}" * 10_000}}, step=step)
for number in range(100):
    run.config.update({{f"key-{{number}}": "x" * 4000}})
run.finish()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run whose rows are followed by many records without a step."""
    folder = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-c", WRITE], cwd=folder, check=True, capture_output=True)
    (path,) = folder.glob("wandb/offline-run-*/run-abc.wandb")
    assert path.stat().st_size > (TAIL_BLOCKS + 4) * BLOCK_BYTES
    return path


def test_the_last_step_is_found_before_a_long_end_without_steps(log: Path) -> None:
    assert last_step(log.parents[1], "abc") == ROWS
    assert last_step(log.parents[1], "another") == 0


def test_only_the_end_of_a_long_file_is_read(log: Path, tmp_path: Path) -> None:
    """A record that a kill truncated is omitted, and the beginning of the file does not matter."""
    found = {}
    for size in range(10 * BLOCK_BYTES, log.stat().st_size, 4999):
        copy = tmp_path / f"{size}" / "offline-run-1-abc" / "run-abc.wandb"
        copy.parent.mkdir(parents=True)
        content = log.read_bytes()[:size]
        copy.write_bytes(content)
        found[size] = last_step(copy.parents[1], "abc")
        copy.write_bytes(bytes(BLOCK_BYTES) + content[BLOCK_BYTES:])
        assert last_step(copy.parents[1], "abc") in (found[size], 0)
    assert list(found.values()) == sorted(found.values())
    assert 0 < found[10 * BLOCK_BYTES] < max(found.values()) <= ROWS
