"""Codes in words: what goes in comes out, and compressed-tensors packs them alike."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from error_assertions import raises_error
from safetensors.numpy import save_file

from forerun.config.training_method import Qat
from forerun.hub.safetensors import open_weights
from forerun.methods.qat import QatTransform
from forerun.models.decoder_config import Gpt2Config
from forerun.models.families import gpt2
from forerun.models.gpt2 import Gpt2
from forerun.nn import spec
from forerun.weights_io.packed import Unpacked, pack, unpack, write_packed


def codes_of(bits: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns)).astype(np.int8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 20, 7])
def test_what_is_packed_is_unpacked(bits: int, columns: int) -> None:
    codes = codes_of(bits, columns)
    words = pack(codes, bits)
    assert (words.dtype, words.shape) == (np.int32, (5, -(-columns * bits // 32)))
    np.testing.assert_array_equal(unpack(words, bits, columns), codes)
    lowest = np.array([[-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]], np.int8)
    assert pack(lowest, bits)[0, 0] == (2**bits - 1) << bits, "the first code is in the lowest bits, and is 0"


@pytest.mark.torch
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 20, 7])
def test_compressed_tensors_packs_alike(bits: int, columns: int) -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = codes_of(bits, columns)
    np.testing.assert_array_equal(pack(codes, bits), pack_to_int32(torch.from_numpy(codes), bits).numpy())


@pytest.mark.parametrize(("scale_shape", "is_valid"), [((4, 3), True), ((4, 5), False), ((3, 3), False), ((4,), False)])
def test_scales_must_divide_the_rows_of_codes(tmp_path: Path, scale_shape: tuple[int, ...], is_valid: bool) -> None:
    codes, scale = codes_of(8, 12)[:4], np.random.default_rng(1).uniform(0.1, 1.0, scale_shape).astype(np.float32)
    save_file({"a.weight": codes, "a.weight_scale": scale}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        if is_valid:
            expected = [[codes[row, column] * scale[row, column // 4] for column in range(12)] for row in range(4)]
            np.testing.assert_allclose(Unpacked(weights, 8).view("a.weight"), expected, rtol=1e-6)
        else:
            with raises_error("E-WEIGHTS-004"):
                Unpacked(weights, 8)


def test_a_matrix_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    """GPT-2 keeps its matrices the other way round, in a module that no runtime has integers for."""
    model = Gpt2(Gpt2Config(layers=1, embed=16, heads=2, mlp=32, vocab=32, positions=8, norm_eps=1e-5))
    transform = QatTransform(Qat(group=None), {})
    params = spec.initial(model.specs(), jax.random.key(0))
    rounded = transform.start(model.specs(), params, {}, jax.random.key(0))
    with raises_error("E-WEIGHTS-008") as caught:
        write_packed(tmp_path, rounded, gpt2.FAMILY, model, "F32")
    assert "--dense" in str(caught.value.fix)
    assert list(tmp_path.iterdir()) == []
