"""`doctor --smoke` for real, on the virtual devices; and a line that fails says so and ends it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.doctor import smoke


@pytest.fixture(autouse=True)
def _a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps with few tokens each: programs here are compiled without optimizations, so steps are slow."""
    full_size = smoke.smoke_job

    def small_job(folder: Path, devices: int) -> Job:
        return full_size(folder, devices).model_copy(update={"sequence": 32, "batch": devices})

    monkeypatch.setattr(smoke, "TRAIN_SECONDS", 0.0)
    monkeypatch.setattr(smoke, "smoke_job", small_job)


def test_every_line_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"ok    {title}" for title, _ in smoke.LINES]
    assert f"{len(jax.devices())} x cpu" in lines[0]
    assert "equal bit for bit" in lines[5]


def test_a_checkpoint_that_lies_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CheckpointStore.restore

    def lying(self: CheckpointStore, step: int, like: object) -> object:
        return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), honest(self, step, like))

    monkeypatch.setattr(CheckpointStore, "restore", lying)
    assert smoke.run() == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "FAIL  checkpoint saved and read back: the checkpoint differs after it was read back"
