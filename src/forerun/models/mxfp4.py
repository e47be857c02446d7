"""Whether the experts of a checkpoint are in MXFP4. Does not import jax.

The section `quantization_config` with the method `mxfp4` describes them: 4-bit floats (e2m1), and a power of two (e8m0)
for every 32 inputs of an output. gpt-oss is published in this format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHOD = "mxfp4"
# Keys that do not change the values of the weights: which parameters are MXFP4 follows from the tensors.
_WITHOUT_EFFECT = ("quant_method", "modules_to_not_convert", "dequantize")


def is_mxfp4(section: Any) -> bool:
    """Return whether a `quantization_config` describes MXFP4 weights that forerun can read."""
    if not isinstance(section, Mapping) or section.get("quant_method") != METHOD:
        return False
    return not any(value for key, value in section.items() if key not in _WITHOUT_EFFECT)
