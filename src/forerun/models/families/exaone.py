"""EXAONE 4: norms after attention and MLP, norms on the heads of q and k, and RoPE only in layers with a window."""

from __future__ import annotations

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    theta, scaling = s.rope(10_000.0)
    window, layers = base.window_or(s, 4096), sizes["layers"]
    types = ["full_attention"] * layers
    if window is not None and s.config.get("layer_types") is None:
        # Published files with a pattern of letters ("LLLG") also have layer_types.
        every = s.take("sliding_window_pattern", 4)
        types = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    rope = Rope(theta, sizes["head_dim"], scaling)
    kinds = {
        "full_attention": LayerKind(None, rope if window is None else None),
        "sliding_attention": LayerKind(window, rope),
    }
    found = base.kinds_of_types(s, layers, types, kinds)
    return DecoderConfig(
        **sizes, qk_norm=True, norms="after", rope_theta=theta, rope_scaling=scaling, kinds=base.repeated(found)
    )


TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.HEAD_NORMS, *base.GATED_MLP, *base.NORMS_AFTER)
FAMILY = base.Family("exaone4", "Exaone4ForCausalLM", read, TABLE)
