"""FP8 checkpoints against transformers' dequantization, and errors for scales that do not fit.

MXFP4 experts against transformers' dequantization, and errors for scales that do not fit.
"""

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
from forerun.hub.safetensors import open_weights
from forerun.hub.snapshot import snapshot
from forerun.methods.job_notes import warnings_of
from forerun.models.model_facts import model_for, pretrained
from forerun.models.quantization_config import Float8, float8_in, is_mxfp4
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io import low_precision
from forerun.weights_io.packed import float_dtypes, opened_snapshot
from forerun.weights_io.write import open_others

CONFIG: dict[str, Any] = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    },
    "vision_config": {"hidden_size": 8},
}
LAYER = "language_model.model.layers.0."
SHAPES = {
    "self_attn.q_proj": (32, 24),
    "self_attn.k_proj": (32, 24),
    "self_attn.v_proj": (32, 24),
    "self_attn.o_proj": (24, 32),
    "mlp.gate_proj": (40, 24),
    "mlp.up_proj": (40, 24),
    "mlp.down_proj": (24, 40),
}
SCALE_SHAPES: dict[str, tuple[int, ...]] = {"none": (), "one": (1,), "matrix": (1, 1)}
VISION = "vision_tower.layers.0.attention.q_proj"


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors as they are in the file. The library safetensors does not read FP8 into NumPy."""
    with open_weights(folder) as weights:
        return {name: np.array(weights.view(name)) for name in weights}


def checkpoint(folder: Path, block: list[int] | None, scale_shape: tuple[int, ...] = ()) -> Path:
    """Write a wrapped checkpoint with FP8 matrices, one of them in the vision tower."""
    rng = np.random.default_rng(7)
    tensors: dict[str, np.ndarray] = {
        LAYER + "input_layernorm.weight": np.ones(24, ml_dtypes.bfloat16),
        LAYER + "post_attention_layernorm.weight": np.ones(24, ml_dtypes.bfloat16),
        "language_model.model.norm.weight": np.ones(24, ml_dtypes.bfloat16),
        "language_model.model.embed_tokens.weight": rng.normal(size=(64, 24)).astype(ml_dtypes.bfloat16),
        "language_model.lm_head.weight": rng.normal(size=(64, 24)).astype(ml_dtypes.bfloat16),
        "vision_tower.norm.weight": rng.normal(size=8).astype(ml_dtypes.bfloat16),
    }
    for name, shape in {**{LAYER + key: shape for key, shape in SHAPES.items()}, VISION: (16, 24)}.items():
        grid = (
            scale_shape if block is None else tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
        )
        tensors[f"{name}.weight"] = rng.normal(0, 40, shape).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = np.asarray(rng.uniform(1e-4, 1e-2, grid), np.float32)
        tensors[f"{name}.activation_scale"] = np.asarray(0.3, ml_dtypes.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": section}))
    return folder


@pytest.mark.torch
@pytest.mark.parametrize(
    ("block", "scale_shape"), [(None, shape) for shape in SCALE_SHAPES.values()] + [([8, 8], ()), ([4, 24], ())]
)
def test_values_are_those_of_transformers(tmp_path: Path, block: list[int] | None, scale_shape: Any) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = checkpoint(tmp_path, block, scale_shape)
    stored = stored_tensors(folder)
    name = LAYER + "mlp.down_proj.weight"
    if block == [4, 24]:
        name = LAYER + "mlp.up_proj.weight"  # transformers needs whole blocks here
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(stored[name].view(np.uint8)).view(torch.float8_e4m3fn),
        torch.from_numpy(stored[f"{name}_scale_inv"]),
        output_dtype=torch.bfloat16,
    )
    with opened_snapshot(snapshot(str(folder))) as weights:
        assert weights[name].dtype == "BF16"
        np.testing.assert_array_equal(weights.view(name).view(np.uint16), theirs.view(torch.uint16).numpy())
        assert not [one for one in weights if "scale" in one or "vision" in one]


@pytest.mark.parametrize("part_bytes", [low_precision._PART_BYTES, 5 * 40 * 4])
def test_partial_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """The last block of a row or a column has fewer values, as in matrices whose sizes are no multiples of 128.

    Parts of five rows begin inside of a block of 16 rows.
    """
    monkeypatch.setattr(low_precision, "_PART_BYTES", part_bytes)
    folder = checkpoint(tmp_path, [16, 16])
    stored, name = stored_tensors(folder), LAYER + "mlp.down_proj.weight"
    scale = stored[f"{name}_scale_inv"]
    assert scale.shape == (2, 3)
    expected = np.array(
        [[float(v) * scale[r // 16, c // 16] for c, v in enumerate(row)] for r, row in enumerate(stored[name])]
    )
    with opened_snapshot(snapshot(str(folder))) as weights:
        np.testing.assert_array_equal(weights.view(name), expected.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_a_job_starts_from_it_and_the_export_is_bfloat16(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, None)
    job = Job.model_validate({"model": str(folder), "data": "unread", "steps": 1})
    found = pretrained(job.model)
    assert found.float8 == Float8(None)
    (warning,) = warnings_of(ResolvedJob(job))
    assert "FP8" in warning
    from forerun.models.model_facts import model_for

    dtypes = float_dtypes(found.snapshot, found.family.table, model_for(found.config))
    assert set(dtypes.values()) == {"BF16"}
    assert len(dtypes) == len(SHAPES) + 5
    with open_others(found.snapshot) as others:
        assert others is not None
        assert {name: info.dtype for name, info in others.items()} == {
            f"{VISION}.weight": "BF16",
            "vision_tower.norm.weight": "BF16",
        }


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_scales_that_do_not_fit_are_rejected(tmp_path: Path, damage: str) -> None:
    folder = checkpoint(tmp_path, [8, 8])
    tensors, name = stored_tensors(folder), LAYER + "mlp.up_proj.weight_scale_inv"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1] if damage == "shape" else tensors[name].astype(np.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as raised:
        opened_snapshot(snapshot(str(folder)))
    assert_error(raised.value, "E-WEIGHTS-030", what="mlp.up_proj.weight", why="blocks of 8 x 8")


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "kv_cache_scheme": {"type": "float"}},
        {"quant_method": "gptq"},
        "fp8",
    ],
)
def test_other_forms_are_not_read(section: Any) -> None:
    assert float8_in(section) is None


def test_published_forms() -> None:
    """As in the FP8 repositories of Qwen, and in Ministral 3."""
    qwen = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    ministral = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    assert (float8_in(qwen), float8_in(ministral)) == (Float8((128, 128)), Float8(None))
    assert float8_in(qwen | {"fmt": "float8_e4m3fn"}) == Float8((128, 128))  # as MiniMax-M2 names it


MXFP4_CONFIG: dict[str, Any] = {
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
MXFP4_SHAPES = {"gate_up_proj": (3, 64, 64), "down_proj": (3, 32, 64)}  # of the parameters in transformers


def mxfp4_checkpoint(folder: Path) -> Path:
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
    for name, (experts, inputs, outputs) in MXFP4_SHAPES.items():
        groups = (experts, outputs, inputs // 32)
        tensors[f"{EXPERTS}{name}_blocks"] = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
        tensors[f"{EXPERTS}{name}_scales"] = rng.integers(0, 255, groups).astype(np.uint8)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MXFP4_CONFIG | {"quantization_config": SECTION}))
    return folder


@pytest.mark.torch
def test_mxfp4_values_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(mxfp4_checkpoint(tmp_path) / "model.safetensors")
    with opened_snapshot(snapshot(str(tmp_path))) as weights:
        assert not [name for name in weights if name.endswith(("_blocks", "_scales"))]
        for name, shape in MXFP4_SHAPES.items():
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
    folder = mxfp4_checkpoint(tmp_path)
    job = Job.model_validate({"model": str(folder), "data": "unread", "steps": 1})
    found = pretrained(job.model)
    assert found.mxfp4
    (warning,) = warnings_of(ResolvedJob(job))
    assert "MXFP4" in warning
    dtypes = float_dtypes(found.snapshot, found.family.table, model_for(found.config))
    assert set(dtypes.values()) == {"BF16"}
    assert {EXPERTS + name for name in MXFP4_SHAPES} <= set(dtypes)


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "not a number"])
def test_mxfp4_scales_that_do_not_fit_are_rejected(tmp_path: Path, damage: str) -> None:
    folder = mxfp4_checkpoint(tmp_path)
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
def test_other_forms_of_mxfp4_are_not_read(section: Any) -> None:
    assert is_mxfp4(SECTION)
    assert not is_mxfp4(section)
