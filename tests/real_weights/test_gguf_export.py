"""A real model as a GGUF file: its metadata equals that of the published file of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.weights_io.gguf.gguf_file import write_gguf
from real_weights import gguf_file, registry

pytest.importorskip("gguf")


def test_smollm2_has_the_metadata_of_the_published_file(smollm2_folder: Path, tmp_path: Path) -> None:
    published = gguf_file.opened(registry.SMOLLM2.file())
    write_gguf(smollm2_folder, tmp_path / "model.gguf", "f16", name="smollm2", ends=[2])
    ours = gguf_file.opened(tmp_path / "model.gguf")
    compared = [
        key
        for key, value in published.metadata.items()
        if key.startswith(("llama.", "tokenizer.")) and ours.metadata.get(key) is not None and _same(ours, key, value)
    ]
    missing = set(published.metadata) - set(compared)
    assert {key for key in missing if key.startswith(("llama.", "tokenizer."))} <= {
        "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.add_space_prefix",
    }
    assert set(ours.tensors) == set(published.tensors)
    for name in ("blk.0.attn_q.weight", "blk.29.attn_k.weight", "blk.3.ffn_down.weight"):
        difference = np.abs(ours.read(name) - published.read(name)).max()
        assert difference <= np.abs(published.read(name)).max() * 2.0**-11


def _same(ours: gguf_file.GgufFile, key: str, value: Any) -> bool:
    found = ours.metadata[key]
    assert found == pytest.approx(value) if isinstance(value, float) else found == value, key
    return True
