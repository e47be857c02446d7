"""The parameters of the decoder: their structure, and their specs. `forerun.models.decoder` explains the letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

from forerun.models.decoder_config import DecoderConfig
from forerun.models.layer_kinds import LayerShape, Section
from forerun.models.parameter_axes import (
    CORRECTION,
    active_matrix_count,
    array_axes,
    bias_axes,
    fixed_axes,
    matrix_axes,
    matrix_count,
    norm_axes,
    outer_axes,
    shape_of,
)
from forerun.nn.spec import Fill, Init, LogUniform, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense
from forerun.nn.weights.experts import Experts

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Block(Generic[T]):
    """Parameters of one layer. A parameter that the layer does not have is None."""

    attention_norm: T | None = None
    query: Dense[T] | None = None  # None: the layer has another mixer than attention
    key: Dense[T] | None = None  # None: the layer uses keys and values of an earlier layer
    value: Dense[T] | None = None  # None: values are the keys before their norm
    out: Dense[T] | None = None
    query_bias: T | None = None
    key_bias: T | None = None
    value_bias: T | None = None
    out_bias: T | None = None
    sinks: T | None = None  # a score of each head in the denominator of the softmax (gpt-oss)
    query_norm: T | None = None
    key_norm: T | None = None
    attention_post_norm: T | None = None
    # Gated delta rule
    delta_query: Dense[T] | None = None
    delta_key: Dense[T] | None = None
    delta_value: Dense[T] | None = None
    delta_gate: Dense[T] | None = None  # of the output
    delta_strength: Dense[T] | None = None  # of writes to the state
    delta_decay: Dense[T] | None = None
    delta_out: Dense[T] | None = None
    query_filter: T | None = None
    key_filter: T | None = None
    value_filter: T | None = None
    decay_rate: T | None = None  # its logarithm
    decay_bias: T | None = None
    delta_norm: T | None = None
    # Short convolution
    filter_gate: Dense[T] | None = None  # of the input
    filter_out_gate: Dense[T] | None = None
    filter_input: Dense[T] | None = None
    filter_out: Dense[T] | None = None
    filter: T | None = None
    # MLP
    mlp_norm: T | None = None
    gate: Dense[T] | None = None  # None: the layer has only experts
    up: Dense[T] | None = None
    down: Dense[T] | None = None
    router: Dense[T] | None = None
    expert_gate: Experts[T] | None = None
    expert_up: Experts[T] | None = None
    expert_down: Experts[T] | None = None
    router_bias: T | None = None
    router_correction: T | None = None  # a fixed bias, for the choice of the experts only
    expert_gate_bias: T | None = None
    expert_up_bias: T | None = None
    expert_down_bias: T | None = None
    shared_gate: Dense[T] | None = None  # of the MLP that all tokens use
    dense_post_norm: T | None = None  # of that MLP beside experts, as the next four (Gemma 4)
    expert_norm: T | None = None
    expert_post_norm: T | None = None
    router_norm: T | None = None
    expert_scale: T | None = None  # a factor of each expert's weights
    gate_bias: T | None = None
    up_bias: T | None = None
    down_bias: T | None = None
    mlp_post_norm: T | None = None
    layer_gate: Dense[T] | None = None  # of the layer's own embedding, as the next two
    layer_out: Dense[T] | None = None
    layer_post_norm: T | None = None
    scalar: T | None = None  # a fixed factor of the layer's output
    layer_input: T | None = None  # not a parameter: `with_layer_inputs` puts the layer's own embedding here


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    """Parameters of a decoder.

    A section of layers is one stack, in which every leaf has a leading L, or a stack for each name of a shape.
    """

    embed: T
    blocks: Block[T] | dict[str, Block[T]]
    norm: T
    head: Dense[T] | None  # None: the embedding is the output matrix
    tail: Block[T] | dict[str, Block[T]] | None = None  # layers that do not fill a period of layer kinds
    last: Block[T] | dict[str, Block[T]] | None = None  # layers at the end with other kinds
    last_tail: Block[T] | dict[str, Block[T]] | None = None  # the last layers that do not fill a period
    layer_embed: T | None = None  # own embeddings of all layers, as the next two
    layer_projection: T | None = None
    layer_projection_norm: T | None = None


_LAYER_TABLES = ("layer_embed", "layer_projection")


def decoder_specs(c: DecoderConfig) -> Params[ParamSpec]:
    """Return the specs of all parameters of a decoder."""
    axes = outer_axes(c)
    embed, head = axes["embed"], axes.get("head")
    others: dict[str, Any] = {section.name: _section_specs(c, section) for section in c.sections}
    if c.layer_width:
        others |= {name: ParamSpec(shape_of(c, axes[name]), axes[name], Normal(0.02)) for name in _LAYER_TABLES}
        others["layer_projection_norm"] = _scale(c, axes["layer_projection_norm"])
    return Params(
        embed=ParamSpec(shape_of(c, embed), embed, Normal(0.02)),
        norm=_scale(c, axes["norm"]),
        head=Dense(ParamSpec(shape_of(c, head), head, Normal(0.02), inputs=0)) if head else None,
        **others,
    )


def _section_specs(c: DecoderConfig, section: Section) -> Any:
    """Return the specs of one stack, or of a stack for each name of a shape."""
    stacks = {name: stack(_block_specs(c, shape), len(section.numbers(name))) for name, shape in section.shapes.items()}
    return stacks.get(None, stacks)


def _block_specs(c: DecoderConfig, shape: LayerShape | None) -> Block[ParamSpec]:
    into = Normal(0.02)
    back = Normal(0.02 / (2 * c.layers) ** 0.5)  # 2 x layers outputs add up in the residual stream
    start = dict.fromkeys(("out", "delta_out", "filter_out", "down", "expert_down", "layer_out"), back)
    inputs = dict.fromkeys(("out", "delta_out", "filter_out"), 2)  # they sum over heads and their dimensions
    members: dict[str, Any] = {}
    for name, axes in matrix_axes(c, shape).items():
        made = ParamSpec(shape_of(c, axes, shape), axes, start.get(name, into), inputs=inputs.get(name, 1))
        if c.experts is not None and axes.startswith("X"):
            members[name] = Experts(value=made, share=c.experts.top / c.experts.count)
        else:
            members[name] = Dense(made)
    members |= {name: _scale(c, axes, shape) for name, axes in norm_axes(c, shape).items()}
    members |= {
        name: ParamSpec(shape_of(c, axes, shape), axes, Fill(0.0), decay=False)
        for name, axes in bias_axes(c, shape).items()
    }
    members |= {
        name: ParamSpec(
            shape_of(c, axes),
            axes,
            Fill(0.0 if name == CORRECTION else 1.0),
            decay=False,
            trainable=False,
            keeps_dtype=name == CORRECTION,
        )
        for name, axes in fixed_axes(c).items()
    }
    members |= {
        name: ParamSpec(
            shape_of(c, axes, shape), axes, _ARRAY_STARTS.get(name, Normal(0.02)), decay=False, keeps_dtype=True
        )
        for name, axes in array_axes(shape).items()
    }
    return Block(**members)


# Decay rates of heads are spread over those of short and long memories, as in the published models.
_ARRAY_STARTS: dict[str, Init] = {
    "decay_rate": LogUniform(0.01, 16.0),
    "decay_bias": Fill(1.0),
    "delta_norm": Fill(1.0),
}


def _scale(c: DecoderConfig, axes: str, shape: LayerShape | None = None) -> ParamSpec:
    return ParamSpec(shape_of(c, axes, shape), axes, Fill(0.0 if c.norm_around_one else 1.0), decay=False)


# ---- The number of FLOPs of a decoder ----


def decoder_flops(c: DecoderConfig, sequence: int) -> float:
    """Return the FLOPs per token of a forward and backward pass.

    Counts 6 per matrix element (2 forward, 4 backward). Causal attention adds 12 x heads x head_dim x S/2 per
    layer, or less with a window. The gated delta rule adds 18 per element of its state: it reads the state twice
    and writes it once. The embedding counts only if it is also the output matrix. Of the experts, those count that
    a token uses.
    """
    looked_up = c.vocab * (c.embed + c.size("Y"))
    matrices = count([leaf for leaf in jax.tree.leaves(decoder_specs(c)) if leaf.decay]) - looked_up
    matrices -= matrix_count(c) - active_matrix_count(c)
    if c.tied:
        matrices += c.vocab * c.embed
    scores = sum(
        c.size("H", kind.shape)
        * c.size("D", kind.shape)
        * (sequence / 2 if kind.window is None else _mean_window(sequence, kind.window))
        for kind in c.all_kinds
        if kind.mixer == "attention"
    )
    shapes = [kind.shape for kind in c.all_kinds if kind.mixer == "delta"]
    states = sum(c.size("H", shape) * c.size("D", shape) * c.size("W", shape) for shape in shapes)
    return 6.0 * matrices + 12.0 * scores + 18.0 * states


def _mean_window(sequence: int, window: int) -> float:
    """Return the mean number of visible positions under a sliding window."""
    window = min(window, sequence)
    return window * (1 - window / (2 * sequence))
