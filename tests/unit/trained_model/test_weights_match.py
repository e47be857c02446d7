"""Weights that are not those of config.json stop a run before anything is traced or compiled."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.cli.train import _print_summary
from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.run.train import TrainResult, train
from forerun.weights_io.documents import write_tokenizer

CONFIG = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "tie_word_embeddings": True,
}
LAYER = {
    **{f"self_attn.{name}_proj.weight": [16, 16] for name in "qkvo"},
    "mlp.gate_proj.weight": [32, 16],
    "mlp.up_proj.weight": [32, 16],
    "mlp.down_proj.weight": [16, 32],
    "input_layernorm.weight": [16],
    "post_attention_layernorm.weight": [16],
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama of two layers, all zeros, whose config.json has `changes`."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": [384, 16], "model.norm.weight": [16]}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_tokenizer(None, folder, 256)
    return folder


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 1000}, {"num_hidden_layers": 1}, {"intermediate_size": 64}, {"num_key_value_heads": 1}],
    ids=str,
)
def test_a_mismatch_is_found_before_the_program_is_built(
    make_job: Callable[..., Job], tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        pytest.fail("the program was built")

    monkeypatch.setattr("forerun.run.train.program_on", never)
    job = make_job(f"model={json.dumps(str(write_model(tmp_path / 'model', **change)))}")
    with raises_error("E-WEIGHTS-003"):
        train(job, LineReporter(io.StringIO(), clock=lambda: 0.0))


@pytest.mark.parametrize("losses", [(None, None), (5.0, None)])
def test_the_end_of_a_run_without_a_loss_is_reported(
    make_job: Callable[..., Job], losses: tuple[float | None, float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    summary = dict(zip(("first_loss", "final_loss"), losses, strict=True)) | {
        "steps": 2, "loss_unit": "nats per token", "tokens": 10, "train_seconds": 1.0, "resumed_at": 0,
    }  # fmt: skip
    _print_summary(job, TrainResult(summary, "", None))  # type: ignore[arg-type]
    assert "done: 2 steps" in capsys.readouterr().out
