"""Five steps of a model with experts, of Gemma 4 and of Qwen3.5 beside torch programs that were written for this test.

forerun packs documents into rows, masks them, scans over layers and chunks the loss. The torch programs compute one
document at a time and nothing of the kind, and torch's own AdamW changes their weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch_programs
from families_reference import VARIANTS, Variant, reference_of
from torch_loop import mean_loss, training_losses

import forerun as fr

pytestmark = pytest.mark.torch
STEPS = 5
TEXTS = ["The cat sat.", "A dog ran over the hill and far away.", "Two.", "Rain fell on the old stone bridge."] * 12
PROGRAMS: dict[str, tuple[str, torch_programs.Forward]] = {
    "qwen3-moe": ("qwen3-moe", torch_programs.qwen3_moe),
    "gemma4": ("gemma4-26b", torch_programs.gemma4),
    "qwen3.5": ("qwen3.5", torch_programs.qwen3_5),
}


def with_bytes(variant: Variant) -> Variant:
    """Return the variant with the vocabulary of forerun's byte tokenizer."""
    ids = {"vocab_size": 264, "bos_token_id": 1, "eos_token_id": 256, "pad_token_id": None}
    return replace(variant, dimensions={**variant.dimensions, **ids})


def torch_losses(folder: Path, forward: torch_programs.Forward, batches: list[Any], job: fr.Job) -> list[float]:
    from safetensors.torch import load_file
    from torch.nn.functional import cross_entropy

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.requires_grad_(not name.endswith("layer_scalar"))

    def loss_of(batch: Any) -> Any:
        return mean_loss(
            batch, lambda ids, targets: cross_entropy(forward(weights, config, ids), targets, reduction="none")
        )

    return training_losses(weights.items(), job.optimizer, batches, [job.optimizer.lr] * STEPS, loss_of)


@pytest.mark.parametrize("family", PROGRAMS)
def test_five_steps_follow_an_independent_program(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variant, forward = PROGRAMS[family]
    reference_of(with_bytes(VARIANTS[variant])).save_pretrained(tmp_path / "base")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    experts = {} if family == "qwen3.5" else {"experts": {"balance_loss": 0.0}}
    job = fr.Job(
        name="five",
        model="./base",
        data={"path": "texts.jsonl", "tokenizer": "bytes", "store": "tokens"},
        sequence=64,
        batch=4,
        steps=STEPS,
        device="cpu",
        devices=1,
        precision={"compute": "float32", "params": "float32"},
        optimizer={"lr": 1e-3, "eps": 1e-4, "warmup": 0, "schedule": "constant", "weight_decay": 0.1, "clip": 1.0},
        sample={"tokens": 0},
        **experts,
    )
    program = fr.build(job)
    batches = list(program.batches(steps=STEPS))
    host_batches = [jax.device_get(batch) for batch in batches]
    assert any(batch.segments.max() > 1 for batch in host_batches), "rows must be packed"
    state, losses = program.init(), []
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    expected = torch_losses(tmp_path / "base", forward, host_batches, program.job)
    assert losses[0] - losses[-1] > 0.3, "equal losses of a model that learns nothing prove little"
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
