"""The decoder family against Hugging Face transformers (torch, float32, eager), weights carried over by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import Remat, RopeScaling
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.decoder_params import Block, Params
from forerun.nn.attention import Kernel
from forerun.nn.compute import Compute
from forerun.nn.weights.dense import Dense
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import NextToken

pytestmark = pytest.mark.torch

LENGTH = 24
BASE = DecoderConfig(layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=80)
# Positions up to 512 against an original context of 64: all three branches of the Llama-3 scaling are met.
SCALING = RopeScaling(factor=8.0, low=1.0, high=4.0, original=64)
FAMILIES = {
    "llama": replace(BASE, rope_theta=1000.0, rope_scaling=SCALING, norm_eps=1e-5),
    "qwen2": replace(BASE, qkv_bias=True, rope_theta=1e6),
    "qwen3": replace(BASE, qk_norm=True, head_dim=16, rope_theta=1e6),
    "mistral": replace(BASE, window=6, norm_eps=1e-5),
}
BOTH = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
EVERY = pytest.mark.parametrize("family", FAMILIES)


@dataclass(frozen=True)
class Pair:
    """One set of weights in both worlds."""

    model: Decoder
    params: Params[jax.Array]
    reference: Any


def reference_of(family: str, c: DecoderConfig) -> Any:
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": c.rope_scaling.factor,
            "low_freq_factor": c.rope_scaling.low,
            "high_freq_factor": c.rope_scaling.high,
            "original_max_position_embeddings": c.rope_scaling.original,
        }
    more: dict[str, Any] = {"sliding_window": c.window} if family == "mistral" else {}
    if family != "qwen2":  # there it is always hidden / heads
        more["head_dim"] = c.head_dim
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=c.vocab,
        hidden_size=c.embed,
        intermediate_size=c.mlp,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied,
        rope_parameters=rope,
        max_position_embeddings=512,
        attn_implementation="eager",
        **more,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def params_of(named: dict[str, np.ndarray], c: DecoderConfig) -> Params[jax.Array]:
    """Hugging Face names and layouts ([out, in], per layer) as forerun's tree. Serves gradients as well."""

    def layered(name: str, arrange: Any = lambda x: x) -> jax.Array:
        return jnp.asarray(np.stack([arrange(named[f"model.layers.{i}.{name}"]) for i in range(c.layers)]))

    def heads(name: str, count: int) -> Dense[jax.Array]:
        return Dense(layered(f"self_attn.{name}.weight", lambda w: w.T.reshape(c.embed, count, c.head_dim)))

    def flat(name: str) -> Dense[jax.Array]:
        return Dense(layered(f"mlp.{name}.weight", lambda w: w.T))

    def bias(name: str, count: int) -> jax.Array | None:
        if not c.qkv_bias:
            return None
        return layered(f"self_attn.{name}.bias", lambda b: b.reshape(count, c.head_dim))

    return Params(
        embed=jnp.asarray(named["model.embed_tokens.weight"]),
        blocks=Block(
            attention_norm=layered("input_layernorm.weight"),
            query=heads("q_proj", c.heads),
            key=heads("k_proj", c.kv_heads),
            value=heads("v_proj", c.kv_heads),
            out=Dense(layered("self_attn.o_proj.weight", lambda w: w.T.reshape(c.heads, c.head_dim, c.embed))),
            query_bias=bias("q_proj", c.heads),
            key_bias=bias("k_proj", c.kv_heads),
            value_bias=bias("v_proj", c.kv_heads),
            query_norm=layered("self_attn.q_norm.weight") if c.qk_norm else None,
            key_norm=layered("self_attn.k_norm.weight") if c.qk_norm else None,
            mlp_norm=layered("post_attention_layernorm.weight"),
            gate=flat("gate_proj"),
            up=flat("up_proj"),
            down=flat("down_proj"),
        ),
        norm=jnp.asarray(named["model.norm.weight"]),
        head=None if c.tied else Dense(jnp.asarray(named["lm_head.weight"])),
    )


def pair(family: str, tied: bool) -> Pair:
    import torch

    config = replace(FAMILIES[family], tied=tied)
    reference = reference_of(family, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # no norm is 1 and no bias is 0, so that none can be left out unseen
        for name, weight in reference.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    named = {name: weight.detach().numpy() for name, weight in reference.named_parameters()}
    return Pair(Decoder(config), params_of(named, config), reference)


def tokens(rows: int, length: int, vocab: int = BASE.vocab) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, (rows, length)).astype(np.int32)


def reference_logits(reference: Any, tokens_BS: np.ndarray, positions_BS: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        answer = reference(
            input_ids=torch.from_numpy(tokens_BS).long(),
            position_ids=torch.from_numpy(positions_BS).long(),
            use_cache=False,
        )
    return answer.logits.numpy()


def logits(one: Pair, tokens_BS: Any, segments_BS: Any, positions_BS: Any, compute: Compute) -> np.ndarray:
    def run(params: Params[jax.Array], *arrays: jax.Array) -> jax.Array:
        return one.model.apply(params, *arrays, compute).logits()

    return np.asarray(jax.jit(run)(one.params, *map(jnp.asarray, (tokens_BS, segments_BS, positions_BS))))


@EVERY
@BOTH
def test_logits(family: str, tied: bool) -> None:
    one = pair(family, tied)
    ids = tokens(2, LENGTH)
    # One row from the start, one deep in the context, where RoPE scaling and precision show.
    positions = np.stack([np.arange(LENGTH), 480 + np.arange(LENGTH)]).astype(np.int32)
    expected = reference_logits(one.reference, ids, positions)
    got = logits(one, ids, np.ones_like(ids), positions, Compute())
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-5)


@EVERY
@BOTH
def test_gradients_of_the_mean_loss(family: str, tied: bool) -> None:
    import torch

    one = pair(family, tied)
    drawn = tokens(2, LENGTH + 1)
    ids, targets = drawn[:, :-1], drawn[:, 1:]
    weights = (np.arange(2 * LENGTH).reshape(2, LENGTH) % 3 > 0).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)

    answer = one.reference(input_ids=torch.tensor(ids).long(), use_cache=False).logits
    nats = torch.nn.functional.cross_entropy(
        answer.flatten(0, 1), torch.tensor(targets).flatten().long(), reduction="none"
    )
    expected_loss = (nats * torch.tensor(weights).flatten()).sum() / weights.sum()
    expected_loss.backward()
    named = {name: weight.grad.numpy() for name, weight in one.reference.named_parameters()}
    expected = params_of(named, one.model.config)

    batch = Batch(*map(jnp.asarray, (ids, targets, weights, np.ones_like(ids), positions)))

    def loss(params: Params[jax.Array]) -> jax.Array:
        compute = Compute(attention=Kernel("xla"), remat=Remat(policy="full"))
        sums = NextToken(chunk=7)(one.model, params, batch, compute)
        total, counted = sums.loss, sums.weight
        return total / counted

    value, got = jax.jit(jax.value_and_grad(loss))(one.params)
    np.testing.assert_allclose(value, expected_loss.item(), rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), have in zip(leaves, jax.tree.leaves(got), strict=True):
        error = np.linalg.norm(have - want) / np.linalg.norm(want)
        assert error < 1e-4, f"{jax.tree_util.keystr(path)}: {error}"


@EVERY
def test_packed_documents_are_separate_runs(family: str) -> None:
    """Three documents and padding in one row against three runs of the reference that know nothing of packing."""
    one = pair(family, tied=True)
    lengths = (5, 11, 4)  # the second is longer than Mistral's window
    row = tokens(1, LENGTH)
    segments, positions = np.zeros((1, LENGTH), np.int32), np.zeros((1, LENGTH), np.int32)
    expected, start = [], 0
    for number, length in enumerate(lengths, start=1):
        here = slice(start, start + length)
        segments[0, here], positions[0, here] = number, np.arange(length)
        expected.append(reference_logits(one.reference, row[:, here], positions[:, here]))
        start += length
    got = logits(one, row, segments, positions, Compute())[:, :start]
    np.testing.assert_allclose(got, np.concatenate(expected, axis=1), rtol=0, atol=5e-5)


def test_mistral_defaults_are_the_named_size() -> None:
    """Transformers' own defaults for Mistral are those of the 7B model."""
    import transformers

    from forerun.models.sizes import SIZES

    theirs, ours = transformers.MistralConfig(), SIZES["mistral-7b"]
    assert (ours.layers, ours.embed, ours.mlp, ours.vocab) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.vocab_size,
    )
    assert (ours.heads, ours.kv_heads, ours.head_dim, ours.window, ours.tied) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.sliding_window,
        theirs.tie_word_embeddings,
    )
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
