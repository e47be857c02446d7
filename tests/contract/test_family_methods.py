"""bench/family_methods.py: one method of one family here, and the recorded results of all."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from families_reference import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "family_methods.json"


@pytest.mark.torch
def test_adapters_of_fused_matrices_and_interleaved_rope_are_exported(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("family_methods", ROOT / "bench" / "family_methods.py")
    assert found is not None
    assert found.loader is not None
    bench: Any = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # the module sets both for its own process
        here.setenv("JAX_PLATFORMS", "cpu")
        found.loader.exec_module(bench)
    result = bench.result_of("lora", bench.checkpoint_of("glm4", tmp_path), tmp_path, steps=3)
    assert "failed" not in result, result
    assert result["steps"] == 3


def test_every_recorded_method_ran_or_was_rejected() -> None:
    results = json.loads(RESULTS.read_text())
    assert set(results) <= {variant.row for variant in VARIANTS.values()}
    for row, methods in results.items():
        assert set(methods) == {"sft", "lora", "qlora", "qat", "dpo"}, row
        for name, result in methods.items():
            assert "failed" not in result, (row, name)
            assert "rejected" in result or (result["steps"], result["logits_apart"] < 1e-3) == (20, True), (row, name)
