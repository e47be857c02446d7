"""Fixtures of a job so small that compiling it is most of its work. A conftest.py imports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.config.load import load
from forerun.config.schema import Job

MakeJob = Callable[..., Job]
JOB = """\
model: {layers: 1, embed: 16, heads: 2}
data: text
sequence: 16
batch: 8
steps: 6
device: cpu
devices: 1
optimizer: {lr: 1e-2}
precision: {compute: float32}
remat: none
checkpoint: {every: 2}
sample: {tokens: 0}
"""
TEXT = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture(scope="session")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "text").mkdir()
    (folder / "text" / "tale.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(JOB)
    return folder / "tiny.yaml"


@pytest.fixture
def make_job(job_file: Path, tmp_path: Path) -> MakeJob:
    """The tiny job with overrides, its runs under the test's own folder."""
    return lambda *overrides: load(job_file, [f"runs={tmp_path / 'runs'}", *overrides]).job
