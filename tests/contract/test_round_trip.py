"""Every family in and out again without training: the same tensors, the same dtypes, the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families_reference as families
import ml_dtypes
import numpy as np
import pytest
from family_parity import read_and_write
from safetensors.numpy import load_file, save_file

from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.hub.safetensors import open_weights
from forerun.weights_io.match import matches

pytestmark = pytest.mark.torch

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("name", families.chosen_variants("round trip"))
def test_bit_for_bit(name: str, tmp_path: Path, families_table: Callable[[str, str, Any], None]) -> None:
    """In three dtypes, through float32 arrays on eight devices; several files where the checkpoint is large enough."""
    pair = families.pair(name)
    original = load_file(pair.folder / "model.safetensors")
    for dtype, kind in DTYPES.items():
        came, went = tmp_path / dtype, tmp_path / f"{dtype} again"
        came.mkdir()
        went.mkdir()
        save_file({key: value.astype(kind) for key, value in original.items()}, came / "model.safetensors")
        read_and_write(pair, came, went, MeshShape(2, 2, 2), shard_bytes=20_000)
        index = json.loads((went / "model.safetensors.index.json").read_text())["weight_map"]
        written = {key: load_file(went / file)[key] for key, file in index.items()}
        read = load_file(came / "model.safetensors")
        assert set(written) == set(read)
        for key, value in read.items():
            assert written[key].dtype == value.dtype, key
            assert written[key].tobytes() == value.tobytes(), key
    families_table(families.VARIANTS[name].row, "round trip", True)


def test_keys_of_layers_that_share_them_are_ignored(tmp_path: Path) -> None:
    """Published files of Gemma 4 E2B have them. Those of layer 2 are its own, so its values must not be missing."""
    pair = families.pair("gemma4-e2b")
    original = load_file(pair.folder / "model.safetensors")
    unused = {f"model.layers.4.self_attn.{name}.weight": np.zeros(2, np.float32) for name in ("k_proj", "k_norm")}
    save_file(original | unused, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        found = {match.name for match in matches(weights, pair.family.table, pair.model)}
    assert found == set(original)
    del original["model.layers.2.self_attn.v_proj.weight"]
    save_file(original | unused, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(UserError, match=r"layers\.2\.self_attn\.v_proj"):
        matches(weights, pair.family.table, pair.model)
