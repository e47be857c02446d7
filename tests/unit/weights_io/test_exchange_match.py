"""A checkpoint that is not the model's is refused with all its faults; known extras are passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from jax.sharding import Mesh

from forerun.errors import UserError
from forerun.hub.safetensors import open_weights
from forerun.weights_io import read
from forerun.weights_io.match import dtypes_of, matches
from forerun.weights_io.read import read_params

Save = Callable[[dict[str, Any]], Path]
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


def to_user_error(kind: Any, folder: Path) -> UserError:
    with open_weights(folder) as weights, pytest.raises(UserError) as caught:
        matches(weights, kind.table, kind.model)
    return caught.value


def test_all_faults_come_in_one_error(tied_checkpoint: Any, save: Save) -> None:
    tensors = tied_checkpoint.tensors("F32")
    del tensors[NORM]
    gate = "model.layers.1.mlp.gate_proj.weight"
    tensors[gate] = np.ascontiguousarray(tensors[gate].T)
    tensors["model.layers.0.mlp.expert.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.int8)
    error = to_user_error(tied_checkpoint, save(tensors))
    assert "4 differences" in error.what
    assert error.why.splitlines() == [
        f"missing: {NORM} [16]",
        f"wrong shape: {gate} is [16, 24], the model needs [24, 16]",
        "wrong dtype: model.layers.2.mlp.up_proj.weight is I8, forerun reads F64, F32, F16, BF16",
        "unexpected: 'model.layers.0.mlp.expert.weight' [2, 2]",
    ]
    assert "not a quantized one" in error.fix


def test_a_long_list_is_cut(tied_checkpoint: Any, save: Save) -> None:
    tensors = tied_checkpoint.tensors("F32")
    kept = {name: value for name, value in tensors.items() if "layernorm" not in name}
    error = to_user_error(tied_checkpoint, save(kept))
    assert "20 differences" in error.what
    assert len(error.why.splitlines()) == 11
    assert error.why.endswith("and 10 more")


def test_nothing_is_put_on_devices_before_the_check(
    tied_checkpoint: Any, one_device: Mesh, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tied_checkpoint.tensors("F32")
    del tensors[EMBED]
    monkeypatch.setattr(read, "Copier", lambda shardings: pytest.fail("an array was put on a device"))
    wanted = tied_checkpoint.wanted(one_device, jnp.float32)
    with open_weights(save(tensors)) as weights, raises_error("E-WEIGHTS-003", "1"):
        read_params(weights, tied_checkpoint.table, tied_checkpoint.model, wanted)


def test_names_without_their_prefix_are_refused_with_the_way_out(tied_checkpoint: Any, save: Save) -> None:
    bare = {name.removeprefix("model."): value for name, value in tied_checkpoint.tensors("F32").items()}
    error = to_user_error(tied_checkpoint, save(bare))
    assert "lack `model.`" in error.fix


def test_rotary_buffers_of_old_files_are_passed_over(tied_checkpoint: Any, save: Save) -> None:
    tensors = tied_checkpoint.tensors("BF16")
    tensors |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for n in range(5)}
    with open_weights(save(tensors)) as weights:
        assert len(matches(weights, tied_checkpoint.table, tied_checkpoint.model)) == len(tensors) - 5


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tied_checkpoint: Any, save: Save) -> None:
    tensors = tied_checkpoint.tensors("BF16")
    tensors["lm_head.weight"] = tensors[EMBED].copy()
    with open_weights(save(tensors)) as weights:
        assert "lm_head.weight" not in dtypes_of(weights, tied_checkpoint.table, tied_checkpoint.model)


@pytest.mark.parametrize("fault", ["value", "dtype", "shape"])
def test_a_tied_head_of_its_own_is_refused(tied_checkpoint: Any, save: Save, fault: str) -> None:
    tensors = tied_checkpoint.tensors("BF16")
    head = tensors[EMBED].copy()
    if fault == "value":
        head[-1, -1] += 1
    tensors["lm_head.weight"] = {"value": head, "dtype": head.astype(np.float32), "shape": head[:-1].copy()}[fault]
    error = to_user_error(tied_checkpoint, save(tensors))
    expected = {"value": "its values differ", "dtype": "it is F32[40, 16]", "shape": "it is BF16[39, 16]"}
    assert expected[fault] in error.why
    assert "tie_word_embeddings" in error.fix


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_comes_with_and_without_its_prefix(
    gpt2_checkpoint: Any, one_device: Mesh, save: Save, prefix: str
) -> None:
    tensors = gpt2_checkpoint.tensors("F32")
    stored = {prefix + name.removeprefix("transformer."): value for name, value in tensors.items()}
    stored |= {f"{prefix}h.{n}.attn.bias": np.ones((1, 1, 12, 12), np.float32) for n in range(2)}
    stored |= {f"{prefix}h.{n}.attn.masked_bias": np.ones((), np.float32) for n in range(2)}
    stored["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    wanted = gpt2_checkpoint.wanted(one_device, jnp.float32)
    with open_weights(save(stored)) as weights:
        params = read_params(weights, gpt2_checkpoint.table, gpt2_checkpoint.model, wanted)
        assert set(dtypes_of(weights, gpt2_checkpoint.table, gpt2_checkpoint.model)) == set(tensors)
    assert np.array_equal(np.asarray(params.positions), tensors["transformer.wpe.weight"])


def test_gpt2_buffers_are_unexpected_elsewhere(tied_checkpoint: Any, save: Save) -> None:
    tensors = tied_checkpoint.tensors("F32") | {"h.0.attn.bias": np.ones(1, np.float32)}
    assert "unexpected: 'h.0.attn.bias' [1]" in to_user_error(tied_checkpoint, save(tensors)).why
