"""Names and axes of the decoder's parameters, derived from its config. Does not import jax.

`Decoder.specs` builds its specs from these axes, and `plan --search` counts parameters with them. The search runs in a
process without jax, so it cannot count the specs themselves. `forerun.models.decoder` explains the letters.
"""

from __future__ import annotations

import math

from forerun.models.decoder_config import DecoderConfig
from forerun.models.layer_kinds import LayerShape


def outer_axes(c: DecoderConfig) -> dict[str, str]:
    """Return the axes of each parameter outside the layers."""
    axes = {"embed": "VE", "norm": "E"}
    if c.layer_width:
        axes |= {"layer_embed": "VY", "layer_projection": "EY", "layer_projection_norm": "P"}
    return axes if c.tied else {**axes, "head": "VE"}


ATTENTION = {"query": "EHD", "key": "EKD", "value": "EKD", "out": "HDE"}
MLP = {"gate": "EF", "up": "EF", "down": "FE"}
EXPERTS = {"router": "EX", "expert_gate": "XEM", "expert_up": "XEM", "expert_down": "XME"}
CORRECTION = "router_correction"
EXPERT_BIASES = {
    "router_bias": "X",
    "expert_gate_bias": "XM",
    "expert_up_bias": "XM",
    "expert_down_bias": "XE",
}
NORMS_BESIDE = {
    "dense_post_norm": "E",
    "expert_norm": "E",
    "expert_post_norm": "E",
    "router_norm": "E",
    "expert_scale": "X",
}
DELTA = {
    "delta_query": "EKD",
    "delta_key": "EKD",
    "delta_value": "EHW",
    "delta_gate": "EHW",
    "delta_strength": "EH",
    "delta_decay": "EH",
    "delta_out": "HWE",
}
DELTA_ARRAYS = {
    "query_filter": "KDI",
    "key_filter": "KDI",
    "value_filter": "HWI",
    "decay_rate": "H",
    "decay_bias": "H",
    "delta_norm": "W",
}
# The channels of a convolution are written as heads, so that tp can split them.
CONVOLUTION = {"filter_gate": "EHD", "filter_out_gate": "EHD", "filter_input": "EHD", "filter_out": "HDE"}
CONVOLUTION_ARRAYS = {"filter": "HDI"}


def matrix_axes(c: DecoderConfig, shape: LayerShape | None = None) -> dict[str, str]:
    """Return the axes of each matrix of a layer of this shape."""
    own = {"layer_gate": "EP", "layer_out": "PE"} if c.layer_width else {}
    mlp = (EXPERTS if c.experts else {}) | (MLP if c.has_mlp else {})
    if c.experts and c.experts.shared:
        mlp |= {"shared_gate": "EA"}
    if shape is not None and shape.mixer == "delta":
        return DELTA | mlp | own
    if shape is not None and shape.mixer == "convolution":
        return CONVOLUTION | mlp | own
    axes = ATTENTION | {"query": "EHJD" if c.attention_gate else "EHD"} | mlp | own
    if shape is None:
        return axes
    absent = ("key", "value") if shape.shares_keys else ("value",) if shape.key_is_value else ()
    return {name: letters for name, letters in axes.items() if name not in absent}


def array_axes(shape: LayerShape | None = None) -> dict[str, str]:
    """Return the axes of each array of a layer of this shape that is neither a matrix nor a norm nor a bias."""
    if shape is None or shape.mixer == "attention":
        return {}
    return DELTA_ARRAYS if shape.mixer == "delta" else CONVOLUTION_ARRAYS


def norm_axes(c: DecoderConfig, shape: LayerShape | None = None) -> dict[str, str]:
    """Return the axes of each norm of a layer of this shape. A norm that the family lacks is absent."""
    axes: dict[str, str] = {}
    if c.norms in ("before", "both"):
        axes |= {"attention_norm": "E", "mlp_norm": "E"}
    if c.norms in ("after", "both"):
        axes |= {"attention_post_norm": "E", "mlp_post_norm": "E"}
    if c.qk_norm and (shape is None or shape.mixer == "attention"):
        axes |= (
            {"query_norm": "HD", "key_norm": "KD"} if c.norm_heads_together else {"query_norm": "D", "key_norm": "D"}
        )
    if c.layer_width:
        axes |= {"layer_post_norm": "E"}
    if c.experts is not None and c.experts.beside:
        axes |= NORMS_BESIDE
    if shape is not None and shape.shares_keys:
        axes.pop("key_norm", None)
    return axes


def bias_axes(c: DecoderConfig, shape: LayerShape | None = None) -> dict[str, str]:
    """Return the axes of each bias of a layer of this shape, and of its sinks. Absent: what the family lacks."""
    axes: dict[str, str] = {}
    matrices = matrix_axes(c, shape)
    if c.qkv_bias:
        axes |= {f"{name}_bias": matrices[name][1:] for name in ("query", "key", "value") if name in matrices}
    if c.out_bias and "out" in matrices:
        axes |= {"out_bias": "E"}
    if c.attention_sinks and "query" in matrices:
        axes |= {"sinks": "H"}
    if c.experts is not None and c.experts.bias:
        axes |= EXPERT_BIASES
    if c.mlp_bias:
        axes |= {"gate_bias": "F", "up_bias": "F", "down_bias": "E"}
    return axes


def fixed_axes(c: DecoderConfig) -> dict[str, str]:
    """Return the axes of the numbers of each layer that no job trains, if the family has some."""
    axes = {"scalar": "A"} if c.layer_scalar else {}
    return axes | ({CORRECTION: "X"} if c.experts is not None and c.experts.sigmoid else {})


def shape_of(c: DecoderConfig, axes: str, shape: LayerShape | None = None) -> tuple[int, ...]:
    """Return the dimensions that the letters of `axes` have in layers of this shape."""
    return tuple(c.size(letter, shape) for letter in axes)


def parameter_count(c: DecoderConfig) -> int:
    """Return the number of parameters of the model."""
    return _numbers(c, outer_axes(c)) + sum(
        _numbers(c, {**matrix_axes(c, shape), **norm_axes(c, shape), **bias_axes(c, shape), **array_axes(shape)}, shape)
        + _numbers(c, fixed_axes(c))
        for shape in (kind.shape for kind in c.all_kinds)
    )


def fixed_count(c: DecoderConfig) -> int:
    """Return the number of parameters that no job trains."""
    return c.layers * _numbers(c, fixed_axes(c))


def matrix_count(c: DecoderConfig) -> int:
    """Return the number of parameters in the matrices of all layers."""
    return sum(layer_matrix_count(c, kind.shape) for kind in c.all_kinds)


def active_matrix_count(c: DecoderConfig) -> int:
    """Return the number of parameters in the matrices that a token uses in all layers."""
    return sum(active_layer_matrix_count(c, kind.shape) for kind in c.all_kinds)


def active_layer_matrix_count(c: DecoderConfig, shape: LayerShape | None = None) -> int:
    """Return the number of parameters in the matrices that a token uses in one layer of this shape."""
    every, used = layer_expert_count(c, shape), active_expert_count(c, shape)
    return layer_matrix_count(c, shape) - every + used


def active_expert_count(c: DecoderConfig, shape: LayerShape | None = None) -> int:
    """Return the number of parameters in the experts that a token uses in one layer of this shape."""
    return layer_expert_count(c, shape) * c.experts.top // c.experts.count if c.experts else 0


def layer_expert_count(c: DecoderConfig, shape: LayerShape | None = None) -> int:
    """Return the number of parameters in the experts of one layer of this shape."""
    experts = {name: letters for name, letters in matrix_axes(c, shape).items() if letters.startswith("X")}
    return _numbers(c, experts, shape)


def layer_matrix_count(c: DecoderConfig, shape: LayerShape | None = None) -> int:
    """Return the number of parameters in the matrices of one layer of this shape."""
    return _numbers(c, matrix_axes(c, shape), shape)


def _numbers(c: DecoderConfig, axes: dict[str, str], shape: LayerShape | None = None) -> int:
    return sum(math.prod(shape_of(c, letters, shape)) for letters in axes.values())
