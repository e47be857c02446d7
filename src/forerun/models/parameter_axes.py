"""Names and axes of the decoder's parameters, derived from its config. Does not import jax.

`Decoder.specs` builds its specs from these axes, and `plan --search` counts parameters with them. The search runs in a
process without jax, so it cannot count the specs themselves. `forerun.models.decoder` explains the letters.
"""

from __future__ import annotations

import math

from forerun.models.sizes import DecoderConfig


def outer_axes(c: DecoderConfig) -> dict[str, str]:
    """Return the axes of each parameter outside the layers."""
    axes = {"embed": "VE", "norm": "E"}
    return axes if c.tied else {**axes, "head": "VE"}


def matrix_axes() -> dict[str, str]:
    """Return the axes of each matrix of one layer."""
    return {"query": "EHD", "key": "EKD", "value": "EKD", "out": "HDE", "gate": "EF", "up": "EF", "down": "FE"}


def norm_axes(c: DecoderConfig) -> dict[str, str]:
    """Return the axes of each norm of one layer. A norm that the family lacks is absent."""
    axes: dict[str, str] = {}
    if c.norms in ("before", "both"):
        axes |= {"attention_norm": "E", "mlp_norm": "E"}
    if c.norms in ("after", "both"):
        axes |= {"attention_post_norm": "E", "mlp_post_norm": "E"}
    if c.qk_norm:
        axes |= (
            {"query_norm": "HD", "key_norm": "KD"} if c.norm_heads_together else {"query_norm": "D", "key_norm": "D"}
        )
    return axes


def bias_axes(c: DecoderConfig) -> dict[str, str]:
    """Return the axes of each bias of one layer. A bias that the family lacks is absent."""
    axes: dict[str, str] = {}
    if c.qkv_bias:
        axes |= {"query_bias": "HD", "key_bias": "KD", "value_bias": "KD"}
    if c.out_bias:
        axes |= {"out_bias": "E"}
    if c.mlp_bias:
        axes |= {"gate_bias": "F", "up_bias": "F", "down_bias": "E"}
    return axes


def shape_of(c: DecoderConfig, axes: str) -> tuple[int, ...]:
    """Return the dimensions that the letters of `axes` have in this model."""
    sizes = {"E": c.embed, "H": c.heads, "K": c.kv_heads, "D": c.head_dim, "F": c.mlp, "V": c.vocab}
    return tuple(sizes[letter] for letter in axes)


def parameter_count(c: DecoderConfig) -> int:
    """Return the number of parameters of the model."""
    layer = _numbers(c, matrix_axes()) + _numbers(c, norm_axes(c)) + _numbers(c, bias_axes(c))
    return c.layers * layer + _numbers(c, outer_axes(c))


def layer_matrix_count(c: DecoderConfig) -> int:
    """Return the number of parameters in the matrices of one layer."""
    return _numbers(c, matrix_axes())


def _numbers(c: DecoderConfig, axes: dict[str, str]) -> int:
    return sum(math.prod(shape_of(c, letters)) for letters in axes.values())
