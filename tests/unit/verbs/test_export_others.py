"""The comparison of the tensors that an export copies: a changed, missing or converted tensor is an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from error_assertions import assert_error
from safetensors.numpy import save_file

from forerun.errors import UserError
from forerun.hub.snapshot import snapshot
from forerun.verbs.export.write_model import compared_others, copied_tensors

TOWER, PROJECTOR, TEXT = "vision_tower.a.weight", "multi_modal_projector.b", "language_model.model.norm.weight"


def folder(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    text = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    return path


def tensors() -> dict[str, np.ndarray]:
    return {TOWER: np.arange(6, dtype=np.float32), PROJECTOR: np.arange(3), TEXT: np.ones(4, np.float16)}


@pytest.mark.parametrize("damage", ["byte", "missing", "dtype", "shape", "extra"])
def test_a_changed_tensor_is_an_error(tmp_path: Path, damage: str) -> None:
    written = tensors()
    if damage == "missing":
        del written[TOWER]
    if damage == "extra":
        written["vision_tower.new"] = written[TOWER]
    if damage == "byte":
        written[TOWER].view(np.uint8)[7] ^= 1
    if damage == "dtype":
        written[TOWER] = written[TOWER].view(np.int32)
    if damage == "shape":
        written[TOWER] = written[TOWER].reshape(2, 3)
    base, copy = folder(tmp_path / "base", tensors()), folder(tmp_path / "copy", written)
    with copied_tensors(snapshot(str(base))) as others:
        assert others is not None
        with pytest.raises(UserError) as raised:
            compared_others(copy, snapshot(str(base)), others)
    assert_error(raised.value, "E-WEIGHTS-031", what="vision_tower")


def test_trained_tensors_may_differ(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", tensors())
    copy = folder(tmp_path / "copy", tensors() | {TEXT: np.zeros(4, np.float16)})
    with copied_tensors(snapshot(str(base))) as others:
        assert others is not None
        assert set(others) == {TOWER, PROJECTOR}
        assert "2 tensors" in compared_others(copy, snapshot(str(base)), others)
