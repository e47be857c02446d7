"""Weights of a checkpoint in FP8 or MXFP4: floats that share scales. Does not import jax.

The section `quantization_config` of config.json describes them. With the method `fp8`, there is one scale per matrix or
one per block. With `mxfp4`, experts are 4-bit floats (e2m1), and a power of two (e8m0) scales every 32 inputs of an
output. gpt-oss is published in that format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP8, MXFP4 = "fp8", "mxfp4"
# Keys that do not change the values of the weights: which weights are quantized follows from the tensors.
_WITHOUT_EFFECT = ("quant_method", "modules_to_not_convert", "dequantize")
_FLOAT8_WITHOUT_EFFECT = (*_WITHOUT_EFFECT, "activation_scheme", "scale_fmt")


@dataclass(frozen=True)
class Float8:
    """The scales of FP8 matrices."""

    block: tuple[int, int] | None  # rows and columns that share a scale; None: one scale per matrix

    def __str__(self) -> str:
        return f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "one scale per matrix"


def float8_in(section: Any) -> Float8 | None:
    """Return the scales that a `quantization_config` describes, or None if forerun cannot read them."""
    if not isinstance(section, Mapping) or section.get("quant_method") != FP8:
        return None
    block, form = section.get("weight_block_size"), section.get("fmt", "e4m3")
    known = {*_FLOAT8_WITHOUT_EFFECT, "weight_block_size", "fmt"}
    if form not in ("e4m3", "float8_e4m3fn") or any(value for key, value in section.items() if key not in known):
        return None
    if block is None:
        return Float8(None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return Float8((sizes[0], sizes[1]))


def is_mxfp4(section: Any) -> bool:
    """Return whether a `quantization_config` describes MXFP4 weights that forerun can read."""
    if not isinstance(section, Mapping) or section.get("quant_method") != MXFP4:
        return False
    return not any(value for key, value in section.items() if key not in _WITHOUT_EFFECT)
