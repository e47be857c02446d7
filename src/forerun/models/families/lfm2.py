"""LFM2 and LFM2.5 (dense): layers with a gated short convolution between layers with attention."""

from __future__ import annotations

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.nn.rope import Rope

CONVOLUTION, FULL = "conv", "full_attention"
# Older names of keys, and keys of the training framework that repeat other keys.
WITHOUT_EFFECT = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "norm_eps", "num_heads",
    "use_pos_enc", "theta",
)  # fmt: skip


def read(s: Settings) -> DecoderConfig:
    s.only("conv_bias", False, default=False)
    s.only("use_pos_enc", True, default=True)
    s.only("block_use_swiglu", True, default=True)
    eps = s.take("norm_eps", 1e-5)
    sizes = base.dimensions(s, tied=True, eps=eps)
    sizes["tied"] = bool(s.take("tie_embedding", sizes["tied"]))
    sizes["mlp"] = _mlp(s, s.take("block_ff_dim", sizes["mlp"]))
    rope = base.rope(s, 1_000_000.0)
    layers, embed, heads = sizes["layers"], sizes["embed"], sizes["heads"]
    attending = s.take("full_attn_idxs")
    attending = range(layers) if attending is None else attending
    types = s.take("layer_types", [FULL if n in attending else CONVOLUTION for n in range(layers)])
    if len(types) != layers or set(types) - {CONVOLUTION, FULL}:
        raise s.refused(f"layer_types of {sorted(set(types))} for {layers} layers")
    # Channels of a convolution are independent. They are grouped like heads, so that tp can split them.
    groups = 1 if embed % heads else heads
    width = s.take("conv_L_cache", 3)
    kinds = {
        FULL: LayerKind(None, Rope(rope["rope_theta"], sizes["head_dim"], rope["rope_scaling"]), LayerShape("full")),
        CONVOLUTION: LayerKind(
            None, None, LayerShape("short", "convolution", heads=groups, head_dim=embed // groups, width=width)
        ),
    }
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        **rope,
        kinds=base.repeated([kinds[kind] for kind in types]),
    )


def _mlp(s: Settings, given: int) -> int:
    """Return the width of the MLP. Unless told otherwise, it is two thirds of the given one, rounded up."""
    factor, multiple = s.take("block_ffn_dim_multiplier", 1.0), s.take("block_multiple_of", 256)
    if not s.take("block_auto_adjust_ff_dim", True):
        return given
    return -(-int(factor * int(2 * given / 3)) // multiple) * multiple


MIXER = "model.layers.{}.conv."
MLP = "model.layers.{}.feed_forward."
TABLE = (
    tensor("model.embed_tokens.weight", "embed", "V E"),
    tensor("model.embedding_norm.weight", "norm", "E"),
    tensor("lm_head.weight", "head", "V E"),
    *base.PROJECTIONS[:3],
    tensor(base.SELF + "out_proj.weight", "blocks.out", "E (HD)"),
    tensor(base.SELF + "q_layernorm.weight", "blocks.query_norm", "D"),
    tensor(base.SELF + "k_layernorm.weight", "blocks.key_norm", "D"),
    fused(
        MIXER + "in_proj.weight",
        ("blocks.filter_gate", "(HD) E"),
        ("blocks.filter_out_gate", "(HD) E"),
        ("blocks.filter_input", "(HD) E"),
    ),
    tensor(MIXER + "conv.weight", "blocks.filter", "(HD) 1 I"),
    tensor(MIXER + "out_proj.weight", "blocks.filter_out", "E (HD)"),
    tensor(MLP + "w1.weight", "blocks.gate", "F E"),
    tensor(MLP + "w3.weight", "blocks.up", "F E"),
    tensor(MLP + "w2.weight", "blocks.down", "E F"),
    tensor("model.layers.{}.operator_norm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.ffn_norm.weight", "blocks.mlp_norm", "E"),
)
FAMILY = base.Family("lfm2", "Lfm2ForCausalLM", read, TABLE)
