"""The dimensions and settings of a model. Does not import jax, so that errors appear quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.models.layer_kinds import LayerKind, LayerShape, Section, sections
from forerun.nn.rope import Rope, Scaling


@dataclass(frozen=True)
class QueryTemperature:
    """A factor of queries that grows with their position: 1 + beta * log(1 + floor(position / original))."""

    beta: float
    original: int  # in tokens; the factor is 1 for earlier positions


@dataclass(frozen=True)
class ClampedGate:
    """The function between the matrices of an expert in gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), clamped."""

    alpha: float
    limit: float  # of the gate from above, and of up from both sides


@dataclass(frozen=True)
class ExpertConfig:
    """Dimensions of a mixture of experts, which every layer has in place of one MLP, or beside it."""

    count: int
    top: int  # experts per token
    mlp: int  # width inside the MLP of one expert
    normalised: bool = True  # the weights of a token's experts are divided by their sum
    balance_loss: float = 0.0  # published coefficient of the load-balancing loss
    bias: bool = False  # the router and the matrices of experts have biases
    clamped: ClampedGate | None = None  # None: the activation of the model
    shared: bool = False  # every layer also has an MLP of the model's width, whose output a gate scales (Qwen3.5)
    beside: bool = False  # the same without a gate; both have norms of their own, and so has the router (Gemma 4)
    sigmoid: bool = False  # weights are sigmoids, and a fixed bias of each expert affects only the choice (MiniMax-M2)


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and settings of a decoder.

    A job file can set the fields up to `norm_eps`. The later ones come only from a checkpoint's config.json.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    rope_dims: int | None = None  # rotated dimensions of each head; None: all
    out_bias: bool = False
    mlp_bias: bool = False
    norms: Literal["before", "after", "both"] = "before"  # where norms are, relative to attention and MLP
    norm_around_one: bool = False  # norm weights are stored as their difference from 1 (Gemma)
    norm_heads_together: bool = False  # the norms of q and k cover all heads together (OLMo 2)
    activation: Literal["silu", "gelu"] = "silu"  # gelu is the tanh approximation
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of each output of attention and MLP before the addition (Granite)
    logit_divisor: float = 1.0  # of the logits (Granite)
    query_temperature: QueryTemperature | None = None  # None: 1 at every position (Ministral 3 has one)
    query_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    kinds: tuple[LayerKind, ...] = ()  # one period of the layers' kinds; empty: all layers have `window` and RoPE
    attention_gate: bool = False  # the query matrix also has a gate of the attention output for each head (Qwen3.5)
    last_layers: int = 0  # layers at the end that repeat `last_kinds` instead
    last_kinds: tuple[LayerKind, ...] = ()
    value_norm: bool = False  # values have an RMS norm without a scale (Gemma 4)
    layer_scalar: bool = False  # a fixed number scales each layer's output (Gemma 4)
    attention_sinks: bool = False  # each head has a learned score in the denominator of its softmax (gpt-oss)
    layer_width: int = 0  # width of each layer's own embedding (Gemma 4 E2B), or 0
    experts: ExpertConfig | None = None  # None: every layer has one MLP of width `mlp`

    @property
    def has_mlp(self) -> bool:
        """Whether every layer has an MLP of width `mlp`, which all tokens use."""
        return self.experts is None or self.experts.shared or self.experts.beside

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One period of the layers' kinds."""
        rope = Rope(self.rope_theta, self.rope_dims or self.head_dim, self.rope_scaling)
        return self.kinds or (LayerKind(self.window, rope),)

    @property
    def sections(self) -> list[Section]:
        """The consecutive layers that are one part of the parameters each."""
        return sections(self.layers - self.last_layers, self.layer_kinds, self.last_layers, self.last_kinds)

    @property
    def all_kinds(self) -> list[LayerKind]:
        """The kind of every layer, in order."""
        return [section.kind(n) for section in self.sections for n in range(section.layers)]

    def size(self, letter: str, shape: LayerShape | None = None) -> int:
        """Return the dimension of an axis with this letter in layers of one shape."""
        own: dict[str, int | None] = {"J": 2}  # queries and gates
        if shape:
            own |= {"H": shape.heads, "K": shape.kv_heads, "D": shape.head_dim, "F": shape.mlp}
            own |= {"W": shape.value_dim, "I": shape.width}
        sizes = {
            "E": self.embed,
            "H": self.heads,
            "K": self.kv_heads,
            "D": self.head_dim,
            "F": self.mlp,
            "V": self.vocab,
            "P": self.layer_width,
            "Y": self.layers * self.layer_width,
            "A": 1,
            "X": self.experts.count if self.experts else 0,
            "M": self.experts.mlp if self.experts else 0,
        }
        return own.get(letter) or sizes[letter]


@dataclass(frozen=True)
class Gpt2Config:
    """Dimensions of GPT-2, which come only from a checkpoint."""

    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int
    positions: int
    norm_eps: float = 1e-5
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads
