"""`doctor --smoke` for real, on the virtual devices; and a line that fails says so and ends it."""

from __future__ import annotations

import jax
import pytest

from forerun.checkpoint.store import Store
from forerun.doctor import smoke


@pytest.fixture(autouse=True)
def _a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "TRAIN_SECONDS", 0.0)


def test_every_line_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"ok    {title}" for title, _ in smoke.LINES]
    assert f"{len(jax.devices())} x cpu" in lines[0]
    assert "equal bit for bit" in lines[5]


def test_a_checkpoint_that_lies_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Store.restore

    def lying(self: Store, step: int, like: object) -> object:
        return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), honest(self, step, like))

    monkeypatch.setattr(Store, "restore", lying)
    assert smoke.run() == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "FAIL  checkpoint saved and read back: what was read back is not what was saved"
