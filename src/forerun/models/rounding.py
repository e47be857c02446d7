"""How the matrices of a checkpoint were rounded to integers. Does not import jax.

Two kinds of checkpoint record it. One with packed integers has a `quantization_config` in its config.json. One that
`export --dense` wrote has the scales in a folder `qat` beside the weights.
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
