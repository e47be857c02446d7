"""Three decoders in plain torch, written from their published formulas: no transformers, no packing, no scan.

Each function computes the logits of one document from the tensors of a checkpoint and its config.json. They are the
independent reference of tests/contract/test_five_steps.py. Letters: S sequence, H heads, D head, X experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Forward = Callable[["Tensors", Mapping[str, Any], "torch.Tensor"], "torch.Tensor"]


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    normed = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def rotate(x: torch.Tensor, theta: float, angles: int, base_width: int) -> torch.Tensor:
    """Rotate S H D: the first `angles` pairs of the first `base_width` or all dimensions, in halves."""
    import torch

    length, _, width = x.shape
    half = width // 2
    frequencies = torch.zeros(half)
    frequencies[:angles] = theta ** (-torch.arange(angles) * 2.0 / base_width)
    turn = torch.arange(length)[:, None] * frequencies
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Return S (H D) of causal attention, with several query heads for each of keys and values."""
    import torch

    length, heads, _ = q.shape
    k, v = (one.repeat_interleave(heads // one.shape[1], 1) for one in (k, v))
    scores = torch.einsum("shd,thd->hst", q, k) * scale
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.einsum("hst,thd->shd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).reshape(length, -1)


def experts(w: Tensors, name: str, x: torch.Tensor, shares: torch.Tensor, act: Any, count: int) -> torch.Tensor:
    """Return the sum of all experts' outputs, weighted by `shares`, S X: most of them are 0."""
    import torch

    total = torch.zeros_like(x)
    for expert in range(count):
        if f"{name}.gate_up_proj" in w:
            gate, up = w[f"{name}.gate_up_proj"][expert].chunk(2)
            down = w[f"{name}.down_proj"][expert]
        else:
            gate, up, down = (w[f"{name}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        total = total + shares[:, expert, None] * ((act(x @ gate.T) * (x @ up.T)) @ down.T)
    return total


def top_shares(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the softmax of S X over all experts, 0 but for the `count` largest, which sum to 1."""
    import torch

    shares = scores.softmax(-1)
    kept = torch.zeros_like(shares).scatter(-1, shares.topk(count, -1).indices, 1.0)
    return shares * kept / (shares * kept).sum(-1, keepdim=True)


def qwen3_moe(w: Tensors, config: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    import torch

    eps, heads, width = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    theta = config["rope_parameters"]["rope_theta"]
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms(x, w[f"{name}.input_layernorm.weight"], eps)
        q, k, v = (_projected(w, f"{name}.self_attn.{one}_proj", normed, width) for one in "qkv")
        q, k = (rms(one, w[f"{name}.self_attn.{of}_norm.weight"], eps) for one, of in ((q, "q"), (k, "k")))
        q, k = (rotate(one, theta, width // 2, width) for one in (q, k))
        assert q.shape[1] == heads
        x = x + _linear(w, f"{name}.self_attn.o_proj", attend(q, k, v, width**-0.5, None))
        normed = rms(x, w[f"{name}.post_attention_layernorm.weight"], eps)
        shares = top_shares(normed @ w[f"{name}.mlp.gate.weight"].T, config["num_experts_per_tok"])
        x = x + experts(w, f"{name}.mlp.experts", normed, shares, torch.nn.functional.silu, config["num_local_experts"])
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def gemma4(w: Tensors, config: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Gemma 4 with experts beside the MLP, values equal to keys in its full layers, and fixed layer scalars."""
    import torch

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    eps, hidden = config["rms_norm_eps"], config["hidden_size"]
    embedding = w["model.embed_tokens.weight"]
    x = embedding[tokens] * hidden**0.5
    for layer, kind in enumerate(config["layer_types"]):
        name, is_full = f"model.layers.{layer}", kind == "full_attention"
        width = config["per_layer_config"].get(str(layer), config)["head_dim"]
        rope = config["rope_parameters"][kind]
        angles = int(rope.get("partial_rotary_factor", 1.0) * width // 2)

        def norm(of: torch.Tensor, which: str, name: str = name) -> torch.Tensor:
            return rms(of, w[f"{name}.{which}.weight"], eps)

        normed = norm(x, "input_layernorm")
        q, k = (_projected(w, f"{name}.self_attn.{one}_proj", normed, width) for one in "qk")
        v = k if is_full else _projected(w, f"{name}.self_attn.v_proj", normed, width)
        q, k, v = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm"), rms(v, None, eps)
        q, k = (rotate(one, rope["rope_theta"], angles, width) for one in (q, k))
        mixed = attend(q, k, v, 1.0, None if is_full else config["sliding_window"])
        x = x + norm(_linear(w, f"{name}.self_attn.o_proj", mixed), "post_attention_layernorm")
        normed = norm(x, "pre_feedforward_layernorm")
        gate, up = (_linear(w, f"{name}.mlp.{one}_proj", normed) for one in ("gate", "up"))
        dense = norm(_linear(w, f"{name}.mlp.down_proj", gelu(gate) * up), "post_feedforward_layernorm_1")
        routed = rms(x, None, eps) * w[f"{name}.router.scale"] * hidden**-0.5
        shares = top_shares(routed @ w[f"{name}.router.proj.weight"].T, config["top_k_experts"])
        shares = shares * w[f"{name}.router.per_expert_scale"]
        inner = norm(x, "pre_feedforward_layernorm_2")
        sparse = experts(w, f"{name}.experts", inner, shares, gelu, config["num_experts"])
        both = dense + norm(sparse, "post_feedforward_layernorm_2")
        x = (x + norm(both, "post_feedforward_layernorm")) * w[f"{name}.layer_scalar"]
    cap = config["final_logit_softcapping"]
    return cap * torch.tanh(rms(x, w["model.norm.weight"], eps) @ embedding.T / cap)


def qwen3_5(w: Tensors, config: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Qwen3.5: gated delta rule, one token after another, and gated attention. Its norms are centred at 1 + weight."""
    import torch

    eps = config["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][tokens]
    for layer, kind in enumerate(config["layer_types"]):
        name = f"model.layers.{layer}"
        normed = rms(x, 1 + w[f"{name}.input_layernorm.weight"], eps)
        mix = _gated_attention if kind == "full_attention" else _delta_rule
        x = x + mix(w, name, config, normed)
        normed = rms(x, 1 + w[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (_linear(w, f"{name}.mlp.{one}_proj", normed) for one in ("gate", "up"))
        x = x + _linear(w, f"{name}.mlp.down_proj", torch.nn.functional.silu(gate) * up)
    return rms(x, 1 + w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def _gated_attention(w: Tensors, name: str, config: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    import torch

    width, eps, rope = config["head_dim"], config["rms_norm_eps"], config["rope_parameters"]
    turned = int(width * rope["partial_rotary_factor"])
    q, gate = _projected(w, f"{name}.self_attn.q_proj", x, 2 * width).chunk(2, -1)
    k, v = (_projected(w, f"{name}.self_attn.{one}_proj", x, width) for one in "kv")
    q = rms(q, 1 + w[f"{name}.self_attn.q_norm.weight"], eps)
    k = rms(k, 1 + w[f"{name}.self_attn.k_norm.weight"], eps)
    q, k = (
        torch.cat([rotate(one[..., :turned], rope["rope_theta"], turned // 2, turned), one[..., turned:]], -1)
        for one in (q, k)
    )
    mixed = attend(q, k, v, width**-0.5, None)
    return _linear(w, f"{name}.self_attn.o_proj", mixed * gate.reshape(mixed.shape).sigmoid())


def _delta_rule(w: Tensors, name: str, config: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    import torch

    name, length = f"{name}.linear_attn", len(x)
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_width, value_width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    kernel = w[f"{name}.conv1d.weight"][:, 0]
    taps = kernel.shape[1]
    inputs = torch.cat([torch.zeros(taps - 1, kernel.shape[0]), _linear(w, f"{name}.in_proj_qkv", x)])
    mixed = sum((inputs[tap : tap + length] * kernel[:, tap] for tap in range(taps)), torch.zeros(()))
    keys = key_heads * key_width
    q, k, v = torch.nn.functional.silu(mixed).split([keys, keys, value_heads * value_width], -1)
    q, k = (one.reshape(length, key_heads, key_width).repeat_interleave(value_heads // key_heads, 1) for one in (q, k))
    v = v.reshape(length, value_heads, value_width)
    q, k = (one / (one.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    beta = _linear(w, f"{name}.in_proj_b", x).sigmoid()
    rate = torch.nn.functional.softplus(_linear(w, f"{name}.in_proj_a", x) + w[f"{name}.dt_bias"])
    decay = (-w[f"{name}.A_log"].exp() * rate).exp()
    state, outputs = torch.zeros(value_heads, key_width, value_width), []
    for t in range(length):
        state = state * decay[t, :, None, None]
        remembered = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - remembered) * beta[t, :, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * key_width**-0.5)
    gate = _linear(w, f"{name}.in_proj_z", x).reshape(length, value_heads, value_width)
    normed = rms(torch.stack(outputs), w[f"{name}.norm.weight"], config["rms_norm_eps"])
    return _linear(w, f"{name}.out_proj", (normed * torch.nn.functional.silu(gate)).reshape(length, -1))


def _linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _projected(w: Tensors, name: str, x: torch.Tensor, width: int) -> torch.Tensor:
    return _linear(w, name, x).reshape(len(x), -1, width)
