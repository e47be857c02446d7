"""A checkpoint is planned from its config.json alone, whatever family it is of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_process import planned_slices

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "models"))

from published_configs import GEMMA2_2B, GEMMA3_1B, GPT2  # noqa: E402

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GEMMA2_2B, 2_614_341_888), (GEMMA3_1B, 999_885_952), (GPT2, 124_439_808)],
    ids=["gemma-2-2b", "gemma-3-1b", "gpt2"],
)
def test_planned_from_its_config(config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    """Local and global layers, soft caps in the kernel and in the loss, a tail, learned positions: all compile."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "job.yaml").write_text("model: ./model\ndata: x\nsequence: 1024\nbatch: 16\nsteps: 100\n")
    [row] = planned_slices("job.yaml", "--on", "v5e-8", "--no-cache", folder=tmp_path)
    assert row["fits"]
    each = parameters * 4 / 8
    assert each <= row["hbm_weights_bytes"] <= 1.12 * each, "float32, split over 8 devices, tiles filled up"
    assert 0.1 < row["mfu"] < 0.7
