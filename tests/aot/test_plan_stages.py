"""A file with stages through the TPU compiler, before any of them was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main

pytestmark = pytest.mark.aot

JOB = """\
model: {layers: 1, embed: 128, heads: 1, head_dim: 128, mlp: 256, vocab: 512}
data: nothing
sequence: 128
batch: 8
stages:
  qat: {qat: {weights: int4, group: 32}, steps: 100}
  recovery: {lora: {rank: 4}, steps: 50}
"""


def test_each_stage_and_the_total_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["plan", str(tmp_path / "job.yaml"), f"runs={tmp_path / 'runs'}", "--on", "v6e-1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {name: plan["slices"][0] for name, plan in found["stages"].items()}
    assert list(rows) == ["qat", "recovery"]
    # The base of the recovery stage is frozen: its optimizer holds the moments of the adapters only.
    assert rows["recovery"]["hbm_optimizer_bytes"] < rows["qat"]["hbm_optimizer_bytes"] / 4
    (total,) = found["totals"]
    assert (total["slice"], total["fits"]) == ("v6e-1", True)
    assert total["hours"] == pytest.approx(rows["qat"]["hours"] + rows["recovery"]["hours"])
    for way in ("on_demand", "spot"):
        assert total["cost_usd"][way] == pytest.approx(sum(row["cost_usd"][way] for row in rows.values()))
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--max-usd", "0.001"]) == 2
    shown = capsys.readouterr()
    assert "[E-COMMAND-041]" in shown.err
    assert "total of 2 stages" in shown.out
    assert main([*words, "--stage", "recovery"]) == 0
    shown = capsys.readouterr()
    assert str(tmp_path / "runs" / f"{tmp_path.name}-qat" / "model") in shown.out
    assert main([*words, "--search"]) == 2
    assert "[E-COMMAND-042]" in capsys.readouterr().err
