"""Gemma 2, 3 and 4 (text) and VaultGemma: a scaled embedding, and alternating local and global layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.keys import fused, tensor
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.nn.rope import Proportional, Rope, Scaling

GELU = "gelu_pytorch_tanh"  # the tanh approximation


def _common(s: Settings) -> dict[str, Any]:
    # `hidden_act` may be absent or repeat `hidden_activation`. Both must be the tanh approximation.
    s.only("hidden_activation", GELU, default=GELU)
    s.only("use_bidirectional_attention", False, default=False)
    sizes = base.dimensions(s, tied=True, eps=1e-6, head_dim=256, activation=GELU)
    return sizes | {
        **base.biases(s),
        "norms": "both",
        "norm_around_one": True,
        "activation": "gelu",
        "embed_scale": sizes["embed"] ** 0.5,
        "query_scale": float(s.take("query_pre_attn_scalar", 256)) ** -0.5,
    }


def read_gemma2(s: Settings) -> DecoderConfig:
    sizes = _common(s)
    theta, scaling = s.rope(10_000.0)
    rope = Rope(theta, sizes["head_dim"], scaling)
    types = base.periodic_types(sizes["layers"], 2)
    kinds = base.windowed_kinds(s, types, full=rope, sliding=rope, window=s.take("sliding_window", 4096))
    return DecoderConfig(
        **sizes,
        rope_theta=theta,
        rope_scaling=scaling,
        attention_softcap=_cap(s, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(s, "final_logit_softcapping", 30.0),
        kinds=kinds,
    )


def read_vaultgemma(s: Settings) -> DecoderConfig:
    """Return the dimensions of VaultGemma: Gemma 2 without the norms after attention and MLP."""
    return replace(read_gemma2(s), norms="before")


def read_gemma3(s: Settings) -> DecoderConfig:
    sizes = _common(s)
    every = s.take("sliding_window_pattern", s.take("_sliding_window_pattern", 6))
    nested, head_dim = s.take("rope_parameters"), sizes["head_dim"]
    far, far_scaling = s.rope(1_000_000.0, "full_attention")
    near, near_scaling = float(s.take("rope_local_base_freq", 10_000.0)), None
    if nested is not None:
        near, near_scaling = s.rope(10_000.0, "sliding_attention")
    kinds = base.windowed_kinds(
        s,
        base.periodic_types(sizes["layers"], every),
        full=Rope(far, head_dim, far_scaling),
        sliding=Rope(near, head_dim, near_scaling),
        window=s.take("sliding_window", 4096),
    )
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        rope_theta=far,
        rope_scaling=far_scaling,
        attention_softcap=_cap(s, "attn_logit_softcapping", None),
        logit_softcap=_cap(s, "final_logit_softcapping", None),
        kinds=kinds,
    )


def _cap(s: Settings, key: str, default: float | None) -> float | None:
    """Return a soft cap: None if the key is null, or the family's default if it is missing."""
    value = s.take(key, None if key in s.config else default)
    return None if value is None else float(value)


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *base.GATED_MLP,
    *base.NORMS_BOTH,
)
VAULT_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    tensor("model.layers.{}.input_layernorm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.pre_feedforward_layernorm.weight", "blocks.mlp_norm", "E"),
)
GEMMA2 = base.Family("gemma2", "Gemma2ForCausalLM", read_gemma2, TABLE)
GEMMA3 = base.Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3, TABLE)
VAULT = base.Family("vaultgemma", "VaultGemmaForCausalLM", read_vaultgemma, VAULT_TABLE)


# ---- Gemma 4 (text) ----
# Local and global layers have heads of other sizes, unscaled norms of values, and a scalar per layer.
#
# 12B, 26B and 31B use the keys of a global layer also as its values. E2B and E4B have an embedding for each layer, and
# their last layers attend to the keys and values of earlier ones. 26B-A4B has experts beside the MLP of each layer.


LOCAL, GLOBAL = "sliding_attention", "full_attention"
GLOBAL_HEAD = 512  # head_dim of global layers if config.json has none
EVERY = 6  # every sixth layer is global if config.json has no list


def read_gemma4(s: Settings) -> DecoderConfig:
    return _read_gemma4(s, window=512, layer_width=256)


def read_gemma4_unified(s: Settings) -> DecoderConfig:
    return _read_gemma4(s, window=1024, layer_width=0)


def _read_gemma4(s: Settings, *, window: int, layer_width: int) -> DecoderConfig:
    """Return the dimensions. The arguments are defaults: the window, and the width of the per-layer embeddings."""
    # Text is causal with "vision" too: only the tokens of an image see each other in both directions.
    s.only("use_bidirectional_attention", None, "vision")
    s.only("hidden_activation", GELU, default=GELU)
    sizes = base.dimensions(s, tied=True, eps=1e-6, head_dim=256, activation=GELU)
    biases, cap = base.biases(s), s.take("final_logit_softcapping")
    types = _gemma4_types(s, sizes["layers"])
    shapes = _shapes(s, types)
    ropes = _ropes(s, {one: shape.head_dim or sizes["head_dim"] for one, shape in shapes.items()})
    windows = {LOCAL: s.take("sliding_window", window), GLOBAL: None}
    kinds = {one: LayerKind(windows[one], ropes[one], shapes[one]) for one in (LOCAL, GLOBAL)}
    shared = _shared_layers(s, types)
    wide = 2 * sizes["mlp"] if s.take("use_double_wide_mlp", False) else None
    own = len(types) - shared
    sharing = {
        one: replace(kind, shape=replace(shapes[one], key_is_value=False, shares_keys=True, mlp=wide))
        for one, kind in kinds.items()
    }
    return DecoderConfig(
        **sizes,
        **biases,
        qk_norm=True,
        value_norm=True,
        norms="both",
        activation="gelu",
        embed_scale=sizes["embed"] ** 0.5,
        query_scale=1.0,
        logit_softcap=None if cap is None else float(cap),
        layer_scalar=True,
        kinds=base.repeated([kinds[one] for one in types[:own]]),
        last_layers=shared,
        last_kinds=base.repeated([sharing[one] for one in types[own:]]) if shared else (),
        layer_width=_layer_width(s, layer_width, sizes["vocab"]),
        experts=_experts(s) if s.take("enable_moe_block", False) else None,
    )


def _experts(s: Settings) -> ExpertConfig:
    """Return the experts, which no published file has a coefficient of a balance loss for."""
    count, top = s.need("num_experts"), s.need("top_k_experts")
    if top > count:
        raise s.refused(f"top_k_experts: {top} of {count} experts")
    return ExpertConfig(count, top, s.need("moe_intermediate_size"), beside=True)


def _gemma4_types(s: Settings, layers: int) -> list[str]:
    """Return the type of each layer. The last layer is global, whatever the list says, as in transformers."""
    pattern = [LOCAL] * (EVERY - 1) + [GLOBAL]
    types = s.take("layer_types", [pattern[n % EVERY] for n in range(layers)])
    return [*base.known_types(s, types, layers)[:-1], GLOBAL]


def _shapes(s: Settings, types: list[str]) -> dict[str, LayerShape]:
    """Return the shape of each type of layers.

    Published files have `global_head_dim` and `num_global_key_value_heads`. transformers 5 writes `per_layer_config`
    instead, which must have the same values for every global layer, and none for a local one.
    """
    same = bool(s.take("attention_k_eq_v", False))
    head_dim, kv_heads = s.take("global_head_dim", GLOBAL_HEAD), s.take("num_global_key_value_heads")
    if not same:  # transformers ignores the number in this case
        kv_heads = None
    layers: dict[str, Any] | None = s.take("per_layer_config")
    if layers is not None:
        found = {(one, *sorted(layers.get(str(n), {}).items())) for n, one in enumerate(types)}  # one for each type
        given = {one: dict(rest) for one, *rest in found}
        if len(found) != len(given) or given.get(LOCAL):
            raise s.refused("per_layer_config with different layers of one type")
        inner = Settings(given[GLOBAL], f"per_layer_config of {s.where}")
        head_dim, kv_heads = inner.take("head_dim"), inner.take("num_key_value_heads")
        inner.finish()
    return {
        LOCAL: LayerShape("sliding"),
        GLOBAL: LayerShape("full", head_dim=head_dim, kv_heads=kv_heads, key_is_value=same),
    }


def _ropes(s: Settings, widths: dict[str, int]) -> dict[str, Rope]:
    """Return the RoPE of each type of layers. `widths` are those of their heads."""
    s.only("rope_scaling", None)
    given = s.take("rope_parameters")
    near, near_scaling = s.rope(10_000.0, LOCAL)
    far: float = 1_000_000.0
    far_scaling: Scaling | None = Proportional(0.25)
    if given is not None:
        far, far_scaling = s.rope(far, GLOBAL, proportional=True)
        if set(given) != {LOCAL, GLOBAL}:
            raise s.refused("rope_parameters without both types of layers")
    return {LOCAL: Rope(near, widths[LOCAL], near_scaling), GLOBAL: Rope(far, widths[GLOBAL], far_scaling)}


def _shared_layers(s: Settings, types: list[str]) -> int:
    """Return the number of layers at the end that attend to keys and values of earlier layers of their type."""
    shared: int = s.take("num_kv_shared_layers", 0)
    own = len(types) - shared
    if own < 1 or set(types[own:]) - set(types[:own]):
        raise s.refused(f"num_kv_shared_layers: {shared} of {len(types)} layers")
    return shared


def _layer_width(s: Settings, width: int, vocab: int) -> int:
    """Return the width of the embedding that each layer has, or 0, which null means. `width` is the default."""
    width = s.take("hidden_size_per_layer_input", 0 if "hidden_size_per_layer_input" in s.config else width)
    rows = s.take("vocab_size_per_layer_input", 262_144)
    if width and rows != vocab:
        raise s.refused(f"vocab_size_per_layer_input: {rows} with another vocab_size")
    return width


def write_gemma4(c: DecoderConfig) -> dict[str, Any]:
    """Return the config.json of a model without embeddings per layer and without shared keys and values."""
    kinds = {kind.stack_name: kind for kind in c.all_kinds}
    far, near = kinds["full"], kinds["sliding"]
    assert far.shape is not None
    ropes = {GLOBAL: far.rope, LOCAL: near.rope}
    found = base.plain_json(c) | {
        "hidden_activation": GELU,
        "head_dim": c.head_dim,
        "global_head_dim": far.shape.head_dim,
        "num_global_key_value_heads": far.shape.kv_heads,
        "attention_k_eq_v": far.shape.key_is_value,
        "attention_bias": c.qkv_bias,
        "sliding_window": near.window,
        "layer_types": [GLOBAL if kind.window is None else LOCAL for kind in c.all_kinds],
        "rope_parameters": {name: rope_json(rope.theta, rope.scaling) for name, rope in ropes.items() if rope},
        "final_logit_softcapping": c.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }
    del found["hidden_act"]
    if c.experts is None:
        return found
    return found | {
        "enable_moe_block": True,
        "num_experts": c.experts.count,
        "top_k_experts": c.experts.top,
        "moe_intermediate_size": c.experts.mlp,
    }


LAYER = "model.layers.{}."
GEMMA4_TABLE = (
    *base.EMBEDDING,
    tensor("model.embed_tokens_per_layer.weight", "layer_embed", "V Y"),
    tensor("model.per_layer_model_projection.weight", "layer_projection", "Y E"),
    tensor("model.per_layer_projection_norm.weight", "layer_projection_norm", "P"),
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *base.GATED_MLP,
    *base.NORMS_BOTH,
    tensor(LAYER + "per_layer_input_gate.weight", "blocks.layer_gate", "P E"),
    tensor(LAYER + "per_layer_projection.weight", "blocks.layer_out", "E P"),
    tensor(LAYER + "post_per_layer_input_norm.weight", "blocks.layer_post_norm", "E"),
    tensor(LAYER + "layer_scalar", "blocks.scalar", "A"),
    tensor(LAYER + "router.proj.weight", "blocks.router", "X E"),
    tensor(LAYER + "router.scale", "blocks.router_norm", "E"),
    tensor(LAYER + "router.per_expert_scale", "blocks.expert_scale", "X"),
    fused(LAYER + "experts.gate_up_proj", ("blocks.expert_gate", "X M E"), ("blocks.expert_up", "X M E"), along=1),
    tensor(LAYER + "experts.down_proj", "blocks.expert_down", "X E M"),
    tensor(LAYER + "post_feedforward_layernorm_1.weight", "blocks.dense_post_norm", "E"),
    tensor(LAYER + "pre_feedforward_layernorm_2.weight", "blocks.expert_norm", "E"),
    tensor(LAYER + "post_feedforward_layernorm_2.weight", "blocks.expert_post_norm", "E"),
)
GEMMA4 = base.Family("gemma4_text", "Gemma4ForCausalLM", read_gemma4, GEMMA4_TABLE, write_gemma4)
GEMMA4_UNIFIED = base.Family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", read_gemma4_unified, GEMMA4_TABLE)
