"""How the FP8 matrices of a checkpoint are scaled. Does not import jax.

The section `quantization_config` with the method `fp8` describes them: one scale per matrix, or one per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "fp8"
# Keys that do not change the values of the weights: which modules are FP8 follows from the tensors.
_WITHOUT_EFFECT = ("quant_method", "activation_scheme", "modules_to_not_convert", "dequantize", "scale_fmt")


@dataclass(frozen=True)
class Float8:
    """The scales of FP8 matrices."""

    block: tuple[int, int] | None  # rows and columns that share a scale; None: one scale per matrix

    def __str__(self) -> str:
        return f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "one scale per matrix"


def float8_in(section: Any) -> Float8 | None:
    """Return the scales that a `quantization_config` describes, or None if forerun cannot read them."""
    if not isinstance(section, Mapping) or section.get("quant_method") != METHOD:
        return None
    block, form = section.get("weight_block_size"), section.get("fmt", "e4m3")
    known = {*_WITHOUT_EFFECT, "weight_block_size", "fmt"}
    if form not in ("e4m3", "float8_e4m3fn") or any(value for key, value in section.items() if key not in known):
        return None
    if block is None:
        return Float8(None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return Float8((sizes[0], sizes[1]))
