"""SmolLM3: Llama in which every fourth layer has no position embedding."""

from __future__ import annotations

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=True, eps=1e-6)
    theta, scaling = s.rope(2_000_000.0)
    layers, every = sizes["layers"], s.take("no_rope_layer_interval", 4)
    turning = s.take("no_rope_layers", [int((n + 1) % every != 0) for n in range(layers)])
    if len(turning) != layers:
        raise s.refused(f"no_rope_layers of {len(turning)} for {layers} layers")
    windows: list[int | None] = [None] * layers
    types = s.take("layer_types", ["full_attention" if rope else "sliding_attention" for rope in turning])
    types, window = base.known_types(s, types, layers), s.take("sliding_window")
    if s.take("use_sliding_window", False):
        windows = [window if kind == "sliding_attention" else None for kind in types]
    rope = Rope(theta, sizes["head_dim"], scaling)
    kinds = [LayerKind(windows[n], rope if turning[n] else None) for n in range(layers)]
    bias = bool(s.take("attention_bias", False))
    s.take("max_window_layers")
    return DecoderConfig(
        **sizes,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        kinds=base.repeated(kinds),
    )


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    *base.MLP_BIASES,
    *base.NORMS_BEFORE,
)
FAMILY = base.Family("smollm3", "SmolLM3ForCausalLM", read, TABLE)
