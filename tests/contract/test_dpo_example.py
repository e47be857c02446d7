"""The example of preferences gives the numbers that its page states."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from forerun.config.load import load
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dpo"


@pytest.mark.slow
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["device=cpu", "devices=1", f"data.store={tmp_path / 'store'}", f"runs={tmp_path / 'runs'}"]
    out = io.StringIO()
    with make_display(out) as display:
        finished = train(load(EXAMPLE / "job.yaml", given).job, display)
    assert finished is not None
    rows = read_metrics(tmp_path / "runs" / "dpo" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert finished.summary["loss_unit"] == "per pair"
    assert finished.summary["final_loss"] < 0.05
    assert rows[-1]["validation_rewards/accuracies"] == 1.0
    assert "accuracy 100.0%" in out.getvalue()
    assert "validation: 17 of " in out.getvalue()
