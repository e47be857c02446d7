"""The numbers in which a checkpoint stores its matrices: integers, FP8, MXFP4. Does not import jax.

Two kinds of checkpoint record a rounding to integers. One with packed integers has a `quantization_config` in its
config.json. One that `export --dense` wrote has the scales in a folder `qat` beside the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.hub.documents import MAX_CONFIG_BYTES, read_json
from forerun.models.families.wrapper import PATTERNS

QUANTIZATION = "quantization_config"
PACKED, BYTES = "pack-quantized", "int-quantized"
RECORD = "qat"  # the folder with the scales of a dense export
_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Rounding:
    """The rounding of a checkpoint, which is the same for all rounded matrices."""

    bits: int
    group: int | None  # inputs that share a scale; None: one scale per output channel
    activations: bool  # whether the inputs of the matrices are rounded too
    left_out: frozenset[str] = frozenset()  # names of modules that are not rounded, with {} for the layer

    def keeps(self, module: str) -> bool:
        """Return whether a module, with {} for its layer, is rounded in all layers."""
        return module not in self.left_out

    def __str__(self) -> str:
        scope = f"groups of {self.group}" if self.group else "one scale per channel"
        return f"int{self.bits}, {scope}"


def rounding_in(section: Any) -> Rounding | None:
    """Return the rounding that a `quantization_config` describes, or None if `export` does not write this form."""
    if not isinstance(section, Mapping) or section.get("quant_method") != "compressed-tensors":
        return None
    groups, ignore = section.get("config_groups"), section.get("ignore", [])
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(ignore, list):
        return None
    scheme = next(iter(groups.values()))
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(weights, Mapping) or scheme.get("targets") != ["Linear"] or scheme.get("output_activations"):
        return None
    bits, group, tokens = weights.get("num_bits"), weights.get("group_size"), scheme.get("input_activations")
    if not isinstance(bits, int):
        return None
    fits = (
        section.get("format") == (BYTES if tokens else PACKED)
        and bits in (4, 8)
        and weights.get("type") == "int"
        and weights.get("symmetric") is True
        and not weights.get("dynamic")
        and not weights.get("actorder")
        and weights.get("strategy") == ("group" if group else "channel")
        and (group is None or (isinstance(group, int) and group > 0))
        and (tokens is None or _is_by_token(tokens))
        and all(isinstance(name, str) and (name in PATTERNS or not name.startswith("re:")) for name in ignore)
        and not section.get("kv_cache_scheme")
        and not section.get("sparsity_config")
    )
    if not fits:
        return None
    modules = [name for name in ignore if name not in PATTERNS]  # those of the text model
    return Rounding(bits, group, tokens is not None, frozenset(_LAYER.sub(".{}.", name) for name in modules))


def recorded_rounding(folder: Path) -> Rounding | None:
    """Return the rounding that a dense export recorded beside its weights, or None without such a record."""
    file = folder / RECORD / "config.json"
    return rounding_in(read_json(file, limit_bytes=MAX_CONFIG_BYTES).get(QUANTIZATION)) if file.is_file() else None


def _is_by_token(section: Any) -> bool:
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return isinstance(section, Mapping) and all(section.get(key) == value for key, value in wanted.items())


# ---- FP8 and MXFP4: floats that share scales ----
# The section `quantization_config` of config.json describes them. With the method `fp8`, there is one scale per matrix
# or one per block. With `mxfp4`, experts are 4-bit floats (e2m1), and a power of two (e8m0) scales every 32 inputs of
# an output. gpt-oss is published in that format.


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
