"""File types of GGUF, the type of each tensor in them, and the conversion of a tensor to its type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.weights_io.gguf.k_quants import quantize_q4_k, quantize_q6_k
from forerun.weights_io.gguf.tensors import EMBEDDING, HEAD, Floats, GgufTensor

# The name of each file type in llama.cpp, and the type of most of its tensors.
FILE_TYPES = {
    "f32": ("ALL_F32", "F32"),
    "f16": ("MOSTLY_F16", "F16"),
    "bf16": ("MOSTLY_BF16", "BF16"),
    "q8_0": ("MOSTLY_Q8_0", "Q8_0"),
    "q5_0": ("MOSTLY_Q5_0", "Q5_0"),
    "q4_0": ("MOSTLY_Q4_0", "Q4_0"),
    "q4_k_m": ("MOSTLY_Q4_K_M", "Q4_K"),
}
BLOCK_SIZES = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 32, "Q5_0": 32, "Q4_0": 32, "Q4_K": 256, "Q6_K": 256}
# Types for rows that do not divide into blocks. llama-quantize uses the same ones.
SUBSTITUTES = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q8_0": "F16", "Q5_0": "F16", "Q4_0": "F16"}
_SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)\.weight")


def tensor_types(tensors: Sequence[GgufTensor], kind: str, layers: int, tied: bool) -> dict[str, str]:
    """Return the type of each tensor.

    Vectors, norms and position embeddings stay float32. A file of type q4_k_m has Q6_K for the output matrix, and for
    the values and down projections of half of the layers, as llama-quantize chooses them.
    """
    found = {}
    for tensor in tensors:
        wanted = FILE_TYPES[kind][1]
        if len(tensor.shape) < 2 or "_norm." in tensor.name or tensor.name.startswith("position_embd"):
            wanted = "F32"
        elif kind in ("q4_k_m", "q4_0", "q5_0") and _needs_more_bits(tensor.name, kind, layers, tied):
            wanted = "Q6_K"
        while tensor.shape[-1] % BLOCK_SIZES[wanted]:
            wanted = SUBSTITUTES[wanted]
        found[tensor.name] = wanted
    return found


def exact_blocks(value: Floats, steps: Floats, kind: str) -> NDArray[np.uint8] | None:
    """Return blocks of Q4_0 or Q8_0 that keep integers with their scales exactly, or None if that is not possible.

    Args:
        value: The matrix, whose weights are integers times a scale.
        steps: The scale of each block of 32 weights.
        kind: The type of the blocks.
    """
    if kind not in ("Q4_0", "Q8_0"):
        return None
    scale = steps.reshape(-1, 1).astype(np.float16)
    wide, blocks = scale.astype(np.float32), value.reshape(-1, BLOCK_SIZES[kind])
    codes = np.rint(np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0))
    low, high = (-8, 7) if kind == "Q4_0" else (-128, 127)
    if not np.array_equal(codes * wide, blocks) or codes.min() < low or codes.max() > high:
        return None
    if kind == "Q8_0":
        packed: NDArray[Any] = codes.astype(np.int8).view(np.uint8)
    else:
        first, second = np.split((codes + 8).astype(np.uint8), 2, axis=1)
        packed = first | second << np.uint8(4)
    return np.concatenate([scale.view(np.uint8), packed], axis=1).reshape(len(value), -1)


def encoded(value: Floats, kind: str) -> NDArray[Any]:
    """Return a tensor in the bytes of its type, or as an array of floats for F32 and F16."""
    if kind == "Q4_K":
        return quantize_q4_k(value)
    if kind == "Q6_K":
        return quantize_q6_k(value)
    if kind == "F32":
        return value
    if kind == "F16":
        return value.astype(np.float16)
    import gguf

    return gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind])


def _needs_more_bits(name: str, kind: str, layers: int, tied: bool) -> bool:
    """Return whether a matrix gets Q6_K: the output matrix, and in q4_k_m sensitive matrices of some layers.

    These layers are the first and the last eighth, and every third layer between them.
    """
    if name == HEAD or (tied and name == EMBEDDING):
        return True
    found = _SENSITIVE.fullmatch(name)
    if kind != "q4_k_m" or found is None:
        return False
    layer, eighth = int(found[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
