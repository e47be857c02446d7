"""The `Family` class, and the tensor names that most families share with Llama."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.families.settings import Settings, rope_json
from forerun.models.families.wrapper import INNER, Layout, Wrapper
from forerun.models.keys import EXPERT, LAYER, Tensor, fused, tensor
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope, smallest_period

Config = DecoderConfig | Gpt2Config
DROPOUTS = ("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout",
            "residual_dropout")  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face checkpoints."""

    model_type: str
    architecture: str
    read: Callable[[Settings], Config]  # parses a config.json; raises a UserError for features that forerun lacks
    table: tuple[Tensor, ...]  # names and layouts of the tensors
    write: Callable[[Any], dict[str, Any]] | None = None  # returns a config.json; None: only checkpoints have one
    layout: Layout | None = None  # the prefixes in the names of `table`; None for a checkpoint without prefixes
    wrapper: Wrapper | None = None  # the multimodal checkpoint whose text part this is
    renamed: tuple[str, str] | None = None  # a part of the names in the files, and that of the modules
    other_table: tuple[Tensor, ...] | None = None  # that of files with one tensor per expert, if `table` has fused ones

    @property
    def modules(self) -> tuple[Tensor, ...]:
        """The table with the names of the modules in transformers, which may differ from those in the files.

        PEFT and `quantization_config` name modules. Of two tables, this is the one with a tensor per expert: the names
        of a job's targets do not depend on the files.
        """
        table = self.table
        if self.other_table is not None and not any(EXPERT in one.name for one in table):
            table = self.other_table
        if self.renamed is not None:
            return tuple(replace(one, name=one.name.replace(*self.renamed)) for one in table)
        if self.layout is None:
            return table
        plain = (replace(one, name=self.layout.plain(one.name)) for one in table)
        return tuple(plain) if self.wrapper is None else INNER.table(plain)

    def ignored(self, names: Iterable[str]) -> list[str]:
        """Return the `ignore` list of a `quantization_config`.

        It has the modules by their names in the files and in transformers, and patterns for the parts beside the text.

        Args:
            names: The modules of the text model that are not rounded, by their names in the files.
        """
        found = set(names)
        if self.layout is not None and self.wrapper is not None:
            plain = [self.layout.plain(f"{name}.weight") for name in names]
            found |= {INNER.name(name).removesuffix(".weight") for name in plain}
        return [*sorted(found), *(self.wrapper.patterns if self.wrapper else ())]

    def with_layout(self, layout: Layout, wrapper: Wrapper | None) -> Family:
        """Return the family with the names of a checkpoint whose tensors have prefixes."""
        other = None if self.other_table is None else layout.table(self.other_table)
        return replace(self, table=layout.table(self.table), layout=layout, wrapper=wrapper, other_table=other)

    def stored_as(self, names: Collection[str]) -> Family:
        """Return the family with the one of its two tables whose tensors have these names."""
        if self.other_table is None:
            return self
        wanted = {one.name.replace(LAYER, "0").replace(EXPERT, "0") for one in self.other_table if EXPERT in one.name}
        return replace(self, table=self.other_table, other_table=self.table) if wanted <= set(names) else self


SELF = "model.layers.{}.self_attn."
MLP = "model.layers.{}.mlp."

EMBEDDING = (
    tensor("model.embed_tokens.weight", "embed", "V E"),
    tensor("model.norm.weight", "norm", "E"),
    tensor("lm_head.weight", "head", "V E"),
)
FUSED_MLP = (
    fused(MLP + "gate_up_proj.weight", ("blocks.gate", "F E"), ("blocks.up", "F E")),
    tensor(MLP + "down_proj.weight", "blocks.down", "E F"),
)
PROJECTIONS = (
    tensor(SELF + "q_proj.weight", "blocks.query", "(HD) E"),
    tensor(SELF + "k_proj.weight", "blocks.key", "(KD) E"),
    tensor(SELF + "v_proj.weight", "blocks.value", "(KD) E"),
    tensor(SELF + "o_proj.weight", "blocks.out", "E (HD)"),
)
BIASES = (
    tensor(SELF + "q_proj.bias", "blocks.query_bias", "(HD)"),
    tensor(SELF + "k_proj.bias", "blocks.key_bias", "(KD)"),
    tensor(SELF + "v_proj.bias", "blocks.value_bias", "(KD)"),
    tensor(SELF + "o_proj.bias", "blocks.out_bias", "E"),
)
GATED_MLP = (
    tensor(MLP + "gate_proj.weight", "blocks.gate", "F E"),
    tensor(MLP + "up_proj.weight", "blocks.up", "F E"),
    tensor(MLP + "down_proj.weight", "blocks.down", "E F"),
)
MLP_BIASES = (
    tensor(MLP + "gate_proj.bias", "blocks.gate_bias", "F"),
    tensor(MLP + "up_proj.bias", "blocks.up_bias", "F"),
    tensor(MLP + "down_proj.bias", "blocks.down_bias", "E"),
)
JOINT_HEAD_NORMS = (  # over all heads together
    tensor(SELF + "q_norm.weight", "blocks.query_norm", "(HD)"),
    tensor(SELF + "k_norm.weight", "blocks.key_norm", "(KD)"),
)
HEAD_NORMS = (
    tensor(SELF + "q_norm.weight", "blocks.query_norm", "D"),
    tensor(SELF + "k_norm.weight", "blocks.key_norm", "D"),
)
NORMS_BEFORE = (
    tensor("model.layers.{}.input_layernorm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.post_attention_layernorm.weight", "blocks.mlp_norm", "E"),
)
NORMS_AFTER = (
    tensor("model.layers.{}.post_attention_layernorm.weight", "blocks.attention_post_norm", "E"),
    tensor("model.layers.{}.post_feedforward_layernorm.weight", "blocks.mlp_post_norm", "E"),
)
NORMS_BOTH = (
    tensor("model.layers.{}.input_layernorm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.post_attention_layernorm.weight", "blocks.attention_post_norm", "E"),
    tensor("model.layers.{}.pre_feedforward_layernorm.weight", "blocks.mlp_norm", "E"),
    tensor("model.layers.{}.post_feedforward_layernorm.weight", "blocks.mlp_post_norm", "E"),
)


def dimensions(
    s: Settings,
    *,
    tied: bool,
    eps: float,
    head_dim: int | None = None,
    mlp: str = "intermediate_size",
    activation: str = "silu",
) -> dict[str, Any]:
    """Return the settings that all families have in common.

    `tied`, `eps` and `head_dim` are the family's defaults, `mlp` is its key for the width of the MLP, and `activation`
    is the only activation that it has.
    """
    s.only("hidden_act", activation, default=activation)
    embed, heads = s.need("hidden_size"), s.need("num_attention_heads")
    for name in DROPOUTS:
        s.take(name)
    s.only("pretraining_tp", 1, default=1)
    return {
        "layers": s.need("num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": s.take("num_key_value_heads", heads),
        "head_dim": s.take("head_dim", head_dim or embed // heads),
        "mlp": s.need(mlp),
        "vocab": s.need("vocab_size"),
        "tied": s.take("tie_word_embeddings", tied),
        "norm_eps": float(s.take("rms_norm_eps", eps)),
    }


def rope(s: Settings, default_theta: float, *, partial: bool = False) -> dict[str, Any]:
    """Return the settings of RoPE if all layers have the same. The arguments are those of `Settings.rope`."""
    theta, scaling = s.rope(default_theta, partial=partial)
    return {"rope_theta": theta, "rope_scaling": scaling}


def biases(s: Settings) -> dict[str, Any]:
    """Return the settings of biases for families in which `attention_bias` adds all of them."""
    bias = bool(s.take("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def repeated(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return one period of a list that has a kind for every layer."""
    period = smallest_period(kinds)
    return tuple(kinds[:period])


def window_of_layers(s: Settings, layers: int, window: int | None) -> list[int | None]:
    """Return the window of each layer, or None for full attention.

    It comes from `layer_types`, or else from Qwen's `use_sliding_window` and `max_window_layers`.
    """
    types = s.take("layer_types")
    wanted, first = s.take("use_sliding_window", False), s.take("max_window_layers", 28)
    if types is None:
        types = ["sliding_attention" if wanted and window and n >= first else "full_attention" for n in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in known_types(s, types, layers)]


def windowed_kinds(
    s: Settings, default: Sequence[str], *, full: Rope | None, sliding: Rope | None, window: int | None
) -> tuple[LayerKind, ...]:
    """Return one period of the layers' kinds, from `layer_types` or the family's default types.

    Args:
        s: The file.
        default: The type of every layer if the key is missing.
        full: RoPE of layers that see all positions.
        sliding: RoPE of layers with a window.
        window: The window of these layers.
    """
    by_type = {"full_attention": LayerKind(None, full), "sliding_attention": LayerKind(window, sliding)}
    types = known_types(s, s.take("layer_types", list(default)), len(default))
    return repeated([by_type[name] for name in types])


def periodic_types(layers: int, every: int) -> list[str]:
    """Return the types of layers that have a window, except for every `every`th one."""
    return ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]


def window_or(s: Settings, default: int) -> int | None:
    """Return the window: `default` if the key is missing, or None if it is null. Published files have both."""
    window: int | None = s.take("sliding_window", None if "sliding_window" in s.config else default)
    return window


def known_types(s: Settings, types: list[str], layers: int, *known: str) -> list[str]:
    """Return `types`. Raise a UserError unless every layer has a known type, by default full or sliding attention."""
    if len(types) != layers or set(types) - set(known or ("sliding_attention", "full_attention")):
        raise s.refused(f"layer_types of {sorted(set(types))} for {layers} layers")
    return types


def plain_json(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a config.json that all decoders share."""
    return {
        "hidden_size": c.embed,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "vocab_size": c.vocab,
        "tie_word_embeddings": c.tied,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }
