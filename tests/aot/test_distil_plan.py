"""Distillation for TPUs that are not here: the step with a teacher in it, the step with its words, and the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_process import output_of, planned_slices

from forerun.units import Bytes

pytestmark = pytest.mark.aot

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
JOB = """\
model: {layers: 2, embed: 256, heads: 2, mlp: 512, vocab: 1024}
data: {path: text.txt, tokenizer: bytes, store: tokens}
sequence: 256
batch: 16
steps: 10
distil: {teacher: ./teacher, temperature: 2.0, anchor: 0.1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from forerun.weights_io.documents import write_tokenizer

    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(None, tmp_path / "teacher", 256)
    (tmp_path / "text.txt").write_text("A lighthouse is a kind of clock. " * 2000)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def planned(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    rows = planned_slices("job.yaml", *overrides, "--on", "v6e-1,v5e-8", "--no-cache", folder=folder)
    assert [row["fits"] for row in rows] == [True, True]
    return rows


def test_a_teacher_in_the_step_and_its_words_compile(folder: Path) -> None:
    online = planned(folder)
    cached = planned(folder, "distil.cache=words", "distil.top_k=32")
    for with_teacher, without in zip(online, cached, strict=True):
        assert with_teacher["hbm_weights_bytes"] > without["hbm_weights_bytes"], "its weights rest beside"
        assert with_teacher["hbm_batch_bytes"] < without["hbm_batch_bytes"], "its words come with the batch"


def test_the_cache_is_planned(folder: Path) -> None:
    said = output_of("cache", "job.yaml", "distil.cache=words", "distil.top_k=32", "--on", "v6e-1", folder=folder)
    rows = -(-(33 * 2000) // 256)
    exact = rows * (256 * (32 * 4 + 8) + 4)
    assert f"cache: {rows} rows x 256 tokens x 32 of 1024 logits = {Bytes(exact)}" in said
    begin = r"6 min 00 s of it before the first batch"  # 240 + 120 s, and 4 MiB of weights in no time
    price = r"\$\d+\.\d\d on demand or \$\d+\.\d\d on spot"
    assert re.search(rf"^v6e-1: .+ \(.+ to .+\), {begin}, {price}; 17 batches of 16 rows", said, re.MULTILINE)
    assert not (folder / "words").exists(), "--on only says"
