"""MXFP4 experts against transformers' dequantization, and errors for scales that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from error_assertions import assert_error
from safetensors.numpy import load_file, save_file

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hub.snapshot import snapshot
from forerun.methods.job_notes import warnings_of
from forerun.models.pretrained import pretrained
from forerun.models.quantization_config import is_mxfp4
from forerun.models.registry import model_for
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io.packed import float_dtypes, opened_snapshot

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
# As in the published files.
SECTION = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
EXPERTS = "model.layers.0.mlp.experts."
SHAPES = {"gate_up_proj": (3, 64, 64), "down_proj": (3, 32, 64)}  # of the parameters in transformers


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint whose blocks and scales have all values but that for no number."""
    rng = np.random.default_rng(5)
    shapes = {"embed_tokens.weight": (64, 64), "norm.weight": (64,)}
    layer = {
        "self_attn.q_proj": (32, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (64, 32),
        "mlp.router": (3, 64),
    }
    for name, (rows, columns) in layer.items():
        shapes |= {f"layers.0.{name}.weight": (rows, columns), f"layers.0.{name}.bias": (rows,)}
    shapes |= {f"layers.0.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    shapes |= {"layers.0.self_attn.sinks": (2,), "layers.0.mlp.experts.gate_up_proj_bias": (3, 64)}
    shapes |= {"layers.0.mlp.experts.down_proj_bias": (3, 64)}
    tensors: dict[str, np.ndarray] = {
        f"model.{name}": rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16)
    for name, (experts, inputs, outputs) in SHAPES.items():
        groups = (experts, outputs, inputs // 32)
        tensors[f"{EXPERTS}{name}_blocks"] = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
        tensors[f"{EXPERTS}{name}_scales"] = rng.integers(0, 255, groups).astype(np.uint8)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SECTION}))
    return folder


@pytest.mark.torch
def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(checkpoint(tmp_path) / "model.safetensors")
    with opened_snapshot(snapshot(str(tmp_path))) as weights:
        assert not [name for name in weights if name.endswith(("_blocks", "_scales"))]
        for name, shape in SHAPES.items():
            blocks, scales = (torch.from_numpy(stored[f"{EXPERTS}{name}{end}"]) for end in ("_blocks", "_scales"))
            theirs = convert_moe_packed_tensors(blocks, scales).view(torch.uint16).numpy()
            assert (weights[EXPERTS + name].dtype, weights[EXPERTS + name].shape) == ("BF16", shape)
            ours = np.ascontiguousarray(weights.view(EXPERTS + name)).view(np.uint16)
            np.testing.assert_array_equal(ours, theirs)


def test_every_scale_and_code() -> None:
    """Against the definition of e2m1 and e8m0, in float64."""
    from forerun.weights_io.low_precision import _pairs

    def value(code: int) -> float:
        sign, exponent, mantissa = (-1) ** (code >> 3), (code >> 1) & 3, code & 1
        return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))

    got = _pairs().view(ml_dtypes.bfloat16).astype(np.float64).reshape(256, 16, 16, 2)
    codes = np.array([value(code) for code in range(16)])
    with np.errstate(over="ignore"):
        expected = (codes * 2.0 ** (np.arange(255)[:, None] - 127)).astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(got[:255, 0, :, 0], expected)
    np.testing.assert_array_equal(got[:255, :, 0, 1], expected)
    assert np.isnan(got[255]).all()


def test_a_job_starts_from_it_and_says_so(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    job = Job.model_validate({"model": str(folder), "data": "unread", "steps": 1})
    found = pretrained(job.model)
    assert found.mxfp4
    (warning,) = warnings_of(ResolvedJob(job))
    assert "MXFP4" in warning
    dtypes = float_dtypes(found.snapshot, found.family.table, model_for(found.config))
    assert set(dtypes.values()) == {"BF16"}
    assert {EXPERTS + name for name in SHAPES} <= set(dtypes)


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "not a number"])
def test_scales_that_do_not_fit_are_rejected(tmp_path: Path, damage: str) -> None:
    folder = checkpoint(tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), f"{EXPERTS}down_proj_scales"
    scales = tensors.pop(name)
    if damage == "shape":
        tensors[name] = scales[:-1]
    elif damage == "dtype":
        tensors[name] = scales.astype(np.int8)
    elif damage == "not a number":
        tensors[name] = np.where(np.arange(scales.size).reshape(scales.shape) == 7, 255, scales).astype(np.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as raised, opened_snapshot(snapshot(str(folder))) as weights:
        weights.view(f"{EXPERTS}down_proj")
    assert_error(raised.value, "E-WEIGHTS-033", what="experts.down_proj", why="scale")


@pytest.mark.parametrize("section", [{"quant_method": "mxfp4", "weights": "e5m2"}, {"quant_method": "fp8"}, "mxfp4"])
def test_other_forms_are_not_read(section: Any) -> None:
    assert is_mxfp4(SECTION)
    assert not is_mxfp4(section)
