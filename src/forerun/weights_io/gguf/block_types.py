"""File types of GGUF, the type of each tensor in them, and the conversion of a tensor to its type."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.weights_io.gguf.architecture import EMBEDDING, HEAD, Floats, GgufTensor

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


# ---- Quantization to the blocks Q4_K and Q6_K of llama.cpp ----
# A block has 256 weights. Q4_K: eight groups of 32 weights with 4-bit codes; a weight is `d * scale * code - dmin *
# minimum`, and the scales and minima of the groups have 6 bits. Q6_K: sixteen groups of 16 weights with 6-bit codes; a
# weight is `d * scale * (code - 32)`, and the scales have 8 bits. d and dmin are float16.
#
# Each group tries several steps between codes. For each of them, least squares give the best scale. The error counts
# larger weights more, because they contribute more to a product. Letters: N groups, G weights of a group, B blocks.


Bytes = NDArray[np.uint8]
BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
_CHUNK_BLOCKS = 2048  # bounds the memory, and keeps the arrays in the processor's cache
_Q4_STEPS = 21
_Q6_STEPS = 19


def quantize_q4_k(rows: Floats) -> Bytes:
    """Return the blocks of rows of weights, [rows, bytes]. The length of a row must be a multiple of 256."""
    return _by_chunks(rows, _q4_k_blocks, Q4_K_BYTES)


def quantize_q6_k(rows: Floats) -> Bytes:
    """Return the blocks of rows of weights, [rows, bytes]. The length of a row must be a multiple of 256."""
    return _by_chunks(rows, _q6_k_blocks, Q6_K_BYTES)


def _by_chunks(rows: Floats, quantize: Callable[[Floats], Bytes], block_bytes: int) -> Bytes:
    if rows.shape[-1] % BLOCK:
        raise ValueError(f"rows of {rows.shape[-1]} weights do not divide into blocks of {BLOCK}")
    blocks = rows.reshape(-1, BLOCK)
    done = np.empty((len(blocks), block_bytes), np.uint8)

    def fill(start: int) -> None:
        part = slice(start, start + _CHUNK_BLOCKS)
        done[part] = quantize(np.asarray(blocks[part], np.float32))

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy computes outside of Python's lock
        list(threads.map(fill, range(0, len(blocks), _CHUNK_BLOCKS)))
    return done.reshape(*rows.shape[:-1], -1)


def _q4_k_blocks(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 32)
    scales, minima = (part.reshape(-1, 8) for part in _scale_and_minimum(groups, 15))
    d, scale_codes = _six_bits(scales)
    dmin, minimum_codes = _six_bits(minima)
    step = (d.astype(np.float32) * scale_codes).reshape(-1, 1)
    shift = (dmin.astype(np.float32) * minimum_codes).reshape(-1, 1)
    codes = _codes((groups + shift) * _inverse(step), 15).reshape(-1, 4, 2, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4  # two groups share 32 bytes
    return np.concatenate(
        [d.view(np.uint8), dmin.view(np.uint8), _pack_six(scale_codes, minimum_codes), packed.reshape(-1, 128)], axis=1
    )


def _q6_k_blocks(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16)
    scales = _symmetric_scale(groups).reshape(-1, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1, keepdims=True), 1)
    d = (largest / -128).astype(np.float16)
    wide = d.astype(np.float32)
    scale_codes = np.clip(np.rint(scales * _inverse(wide)), -128, 127).astype(np.int8)
    step = (wide * scale_codes).reshape(-1, 1)
    codes = (np.clip(np.rint(groups * _inverse(step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 0xF, codes >> 4
    # Of 128 weights, quarters 0 and 2 share the low halves of bytes, as do quarters 1 and 3; all share the high bits.
    packed_low = low[:, :, :2] | low[:, :, 2:] << 4
    packed_high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [packed_low.reshape(-1, 128), packed_high.reshape(-1, 64), scale_codes.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


def _scale_and_minimum(groups_NG: Floats, top: int) -> tuple[Floats, Floats]:
    """Return for each group a scale and a minimum such that `scale * code - minimum` is near the weights.

    Codes are 0 to `top`. A minimum is at least 0, so that a group of positive weights begins at 0.
    """
    weight_NG = np.sqrt(np.mean(groups_NG**2, axis=1, keepdims=True)) + np.abs(groups_NG)
    low_N1 = np.minimum(groups_NG.min(1, keepdims=True), 0)
    span_N1 = groups_NG.max(1, keepdims=True) - low_N1
    sum_w = weight_NG.sum(1)
    sum_x = (weight_NG * groups_NG).sum(1)
    scale, minimum = span_N1[:, 0] / np.float32(top), -low_N1[:, 0]
    best = np.full(len(groups_NG), np.inf, np.float32)
    for n in range(-1, _Q4_STEPS):
        # The first attempt keeps the range of the weights, the others cut it off or widen it.
        levels = np.float32(top if n < 0 else top - 1 + 0.1 * n)
        codes_NG = np.clip(np.rint((groups_NG - low_N1) * (levels * _inverse(span_N1))), 0, top)
        weighted_NG = weight_NG * codes_NG
        sum_l, sum_l2 = weighted_NG.sum(1), (weighted_NG * codes_NG).sum(1)
        sum_xl = (weighted_NG * groups_NG).sum(1)
        found, offset = _least_squares(sum_w, sum_x, sum_l, sum_l2, sum_xl)
        difference_NG = found[:, None] * codes_NG - offset[:, None] - groups_NG
        error = (weight_NG * difference_NG**2).sum(1)
        better = (error < best) & (found > 0)
        best = np.where(better, error, best)
        scale, minimum = np.where(better, found, scale), np.where(better, offset, minimum)
    return scale, minimum


def _least_squares(
    sum_w: Floats, sum_x: Floats, sum_l: Floats, sum_l2: Floats, sum_xl: Floats
) -> tuple[Floats, Floats]:
    """Return the scale and the minimum with the smallest weighted error for given codes. A minimum is at least 0."""
    determinant = sum_w * sum_l2 - sum_l**2
    scale = (sum_w * sum_xl - sum_x * sum_l) * _inverse(determinant)
    minimum = (sum_l * sum_xl - sum_l2 * sum_x) * _inverse(determinant)
    through_zero = minimum < 0
    return np.where(through_zero, sum_xl * _inverse(sum_l2), scale), np.where(through_zero, 0, minimum)


def _symmetric_scale(groups_NG: Floats) -> Floats:
    """Return for each group a scale such that `scale * code`, with codes -32 to 31, is near the weights."""
    weight_NG = groups_NG**2
    largest_N1 = np.take_along_axis(groups_NG, np.abs(groups_NG).argmax(1, keepdims=True), 1)
    best, scale = np.full(len(groups_NG), -np.inf, np.float32), np.zeros(len(groups_NG), np.float32)
    for n in range(_Q6_STEPS):
        levels = np.float32(32 + 0.1 * (n - _Q6_STEPS // 2))
        codes_NG = np.clip(np.rint(groups_NG * (-levels * _inverse(largest_N1))), -32, 31)
        weighted_NG = weight_NG * codes_NG
        sum_xl, sum_l2 = (weighted_NG * groups_NG).sum(1), (weighted_NG * codes_NG).sum(1)
        gain = sum_xl**2 * _inverse(sum_l2)  # the error is smaller by this than that of a scale of 0
        better = gain > best
        best, scale = np.where(better, gain, best), np.where(better, sum_xl * _inverse(sum_l2), scale)
    return scale


def _six_bits(values: Floats) -> tuple[NDArray[np.float16], Bytes]:
    """Return a float16 step for each block, and codes of 6 bits, such that step * code is near the values."""
    step = (values.max(1, keepdims=True) / 63).astype(np.float16)
    return step, _codes(values * _inverse(step.astype(np.float32)), 63)


def _pack_six(scales: Bytes, minima: Bytes) -> Bytes:
    """Return the 6-bit codes of eight scales and eight minima in twelve bytes.

    Bytes 0 to 3 have the first four scales, bytes 4 to 7 the first four minima, each with the two highest bits of a
    later one. Bytes 8 to 11 have the lower four bits of the later ones.
    """
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 0xF) | (minima[:, 4:] & 0xF) << 4
    return np.concatenate([first, second, third], axis=1)


def _codes(values: Floats, top: int) -> Bytes:
    return np.clip(np.rint(values), 0, top).astype(np.uint8)


def _inverse(values: Floats) -> Floats:
    """Return 1 / values, and 0 where a value is 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)
