"""The dimensions of a model as text, for `forerun check`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.models.decoder_config import DecoderConfig
    from forerun.models.layer_kinds import LayerShape
    from forerun.resolve.resolved_job import ResolvedJob


def model_dimensions(resolved: ResolvedJob) -> str:
    """Return layers, width and vocabulary of a job's model as text."""
    from forerun.models.decoder_config import DecoderConfig

    config = resolved.config
    if not isinstance(config, DecoderConfig):
        return f"counted over the specs of {resolved.job.model.name}"
    shapes = Counter(kind.shape for kind in config.all_kinds)
    if None in shapes:
        return f"{config.layers} layers of width {config.embed}, {_layer(config, None)}, vocabulary {config.vocab}"
    each = ", ".join(f"{count} {shape.name} ({_layer(config, shape)})" for shape, count in shapes.items() if shape)
    return f"{config.layers} layers of width {config.embed}: {each}; vocabulary {config.vocab}"


def _layer(config: DecoderConfig, shape: LayerShape | None) -> str:
    """Return the dimensions of one layer as text."""
    mlp = f"mlp {config.size('F', shape)}"
    if (e := config.experts) is not None:
        beside = f", and a shared one with {mlp}" if config.has_mlp else ""
        mlp = f"{e.count} experts with mlp {e.mlp}, {e.top} per token{beside}"
    if shape is not None and shape.mixer != "attention":
        return mlp
    heads, kv_heads = config.size("H", shape), config.size("K", shape)
    own = shape is None or not shape.shares_keys
    shared = "" if kv_heads == heads and own else f" on {kv_heads} key/value heads" if own else " on shared keys"
    return f"{heads} heads of {config.size('D', shape)}{shared}, {mlp}"
