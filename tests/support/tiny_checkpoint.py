"""A tiny random checkpoint of the same kind as a published one, made by transformers from its config.json.

`tiny_config` keeps every setting of the computation and reduces the dimensions: one period of layers and one more,
narrow matrices, a window and original contexts that are shorter than the rows of the comparison. No norm is 1 and no
bias is 0, so that none can be left out unseen. torch and transformers are imported inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from family_parity import ORIGINAL, VOCAB

from forerun.nn.rope import smallest_period

WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, WINDOW, POSITIONS = 32, 48, 4, 2, 16, 6, 256
MAX_LAYERS = 12  # a longer period is cut
SEED = 3
SPREAD = 0.2  # the standard deviation of all weights

NUMBERS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), MLP),
    "shared_intermediate_size": MLP + 8,
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    "global_head_dim": 2 * HEAD_DIM,
    "hidden_size_per_layer_input": 4,
    "num_global_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
INTERVALS = ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPPED = ("quantization_config", "dtype", "torch_dtype", "auto_map", "transformers_version", "architectures")
PAIRS = ("short_factor", "long_factor")  # one number per pair of rotated dimensions


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a text model with reduced dimensions."""
    tiny = {key: value for key, value in config.items() if key not in DROPPED}
    layers_key = next((key for key in LAYERS if key in config), None)
    before = config.get(layers_key) if layers_key else None
    after = _layers(config, before) if isinstance(before, int) else 0
    for key, value in config.items():
        if key in DROPPED:
            continue
        if key == layers_key:
            tiny[key] = after
        elif key in TOKEN_IDS or key.endswith("_token_id"):
            tiny[key] = TOKEN_IDS.get(key) if value is not None else None
        elif isinstance(value, list) and len(value) == before:
            tiny[key] = value[:after]
        elif key in NUMBERS and value:
            tiny[key] = NUMBERS[key]
    _reduce_heads(config, tiny)
    if isinstance(before, int):
        _reduce_layer_numbers(config, tiny, before, after)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(tiny.get(key), Mapping):
            tiny[key] = _rope(tiny[key], _rotated(tiny))
    if tiny.get("original_max_position_embeddings"):
        tiny["original_max_position_embeddings"] = ORIGINAL
    return tiny


def _layers(config: Mapping[str, Any], before: int) -> int:
    """Return the number of layers: two if all are alike, or else one period and one layer more."""
    periods = [int(config[key]) for key in INTERVALS if config.get(key)]
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == before]
    periods += [smallest_period(value) for value in lists]
    period = min(max(periods, default=1), MAX_LAYERS)
    if config.get("use_sliding_window") and not lists:  # Qwen2: full attention first, then windows
        period = 3
    return min(before, period + 1)


def _reduce_heads(config: Mapping[str, Any], tiny: dict[str, Any]) -> None:
    """Reduce the numbers that depend on those of the heads. Equal numbers stay equal, and different ones different."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    if kv_heads:
        tiny["num_key_value_heads"] = HEADS if kv_heads == heads else 1 if kv_heads == 1 else KV_HEADS
    if heads and width and head_dim:
        tiny["head_dim"] = WIDTH // HEADS if head_dim * heads == width else HEAD_DIM
    if config.get("query_pre_attn_scalar"):
        same = config["query_pre_attn_scalar"] == head_dim
        tiny["query_pre_attn_scalar"] = tiny["head_dim"] if same else 12
    if config.get("linear_num_value_heads"):
        more = config["linear_num_value_heads"] != config.get("linear_num_key_heads")
        tiny["linear_num_value_heads"] = 4 if more else 2


def _reduce_layer_numbers(config: Mapping[str, Any], tiny: dict[str, Any], before: int, after: int) -> None:
    """Reduce keys that count or number layers."""
    first = config.get("max_window_layers")
    if isinstance(first, int):
        tiny["max_window_layers"] = after // 2 if first < before else after
    if config.get("num_kv_shared_layers"):
        tiny["num_kv_shared_layers"] = max(1, after * config["num_kv_shared_layers"] // before)
    named = config.get("per_layer_config")  # Gemma 4: changes by the number of the layer
    if isinstance(named, Mapping):
        changes = {"head_dim": 2 * HEAD_DIM, "num_key_value_heads": 1}
        given = {number: {key: changes.get(key, value) for key, value in one.items()} for number, one in named.items()}
        kept = {number: one for number, one in given.items() if int(number) < after}
        # transformers makes the last layer global, which is a layer with changes.
        last = {str(after - 1): one for one in given.values()}
        tiny["per_layer_config"] = last | kept


def _rotated(tiny: Mapping[str, Any]) -> int:
    """Return the rotated dimensions of a head."""
    head_dim = tiny.get("head_dim") or WIDTH // HEADS
    rope = tiny.get("rope_parameters") or {}
    share = tiny.get("partial_rotary_factor") or (rope.get("partial_rotary_factor") if rope else None) or 1.0
    return int(head_dim * share)


def _rope(given: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """Return a RoPE section for short rows: its original context is shorter than the longest of them."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found[key] = _rope(value, dims)
        elif key in PAIRS:
            found[key] = [value[n * len(value) // (dims // 2)] for n in range(dims // 2)]
        elif key == "mrope_section":
            found[key] = _sections(value, dims // 2)
        elif key == "original_max_position_embeddings":
            found[key] = ORIGINAL
        elif key == "max_position_embeddings":
            found[key] = POSITIONS
        else:
            found[key] = value
    return found


def _sections(parts: list[int], pairs: int) -> list[int]:
    """Return `pairs` divided into sections with about the same shares as `parts`."""
    shares = [pairs * part // sum(parts) for part in parts]
    for n in range(pairs - sum(shares)):
        shares[n % len(shares)] += 1
    return shares


def tiny_reference(config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json, with random weights.

    Code of the checkpoint is never run: the model_type must be one of transformers.

    Raises:
        ValueError: transformers does not have the model_type, or no causal language model for it.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(str(config["model_type"]), **given)
    reference = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
    randomize(reference)
    return reference.eval()


def randomize(reference: Any) -> None:
    """Draw all stored tensors. Those that start as ones, such as most norms, stay around one."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    stored = reference.state_dict()
    with torch.no_grad():
        for name, weight in (*reference.named_parameters(), *reference.named_buffers()):
            if name in stored and weight.is_floating_point():
                center = 1.0 if bool((weight == 1.0).all()) else 0.0
                weight.normal_(center, SPREAD, generator=generator)


def write_tiny(config: Mapping[str, Any], folder: Path) -> Any:
    """Write a tiny checkpoint, and return transformers' model."""
    reference = tiny_reference(tiny_config(config))
    reference.save_pretrained(folder)
    return reference


def parameters_of(reference: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in reference.parameters())
