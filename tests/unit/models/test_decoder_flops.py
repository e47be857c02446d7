"""FLOPs by formula against a count of the multiplications in the traced program."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_shapes import shapes_of

from forerun.config.schema import Remat
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.parameter_axes import active_matrix_count, matrix_count, parameter_count
from forerun.models.sizes import SIZES
from forerun.nn.compute import Compute
from forerun.nn.spec import count

BASE = DecoderConfig(layers=3, embed=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=96, qkv_bias=True, qk_norm=True)


def multiplied(jaxpr: Any) -> int:
    """2 x the products of every dot_general, a scan's body as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(left[dim] for dim in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * multiplied(inner)
    return total


def counted(config: DecoderConfig, sequence: int) -> float:
    """Per token, forward and backward, with scores of all positions against all."""
    model, ids = Decoder(config), jnp.ones((2, sequence), jnp.int32)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(model.apply(params, ids, ids, ids, Compute(remat=Remat(policy="none"))).logits() ** 2)

    return multiplied(jax.make_jaxpr(jax.grad(loss))(shapes_of(model.specs())).jaxpr) / ids.size


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token(tied: bool) -> None:
    """The count is a line in S; its slope is attention, of which the causal half is work."""
    config = replace(BASE, tied=tied)
    short, long = counted(config, 16), counted(config, 48)
    slope = (long - short) / 32
    weights = short - 16 * slope
    for sequence in (16, 48, 1000):
        expected = weights + slope * sequence / 2
        assert Decoder(config).flops_per_token(sequence) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("sequence", "window"), [(512, 100), (512, 512), (100, 4096)])
def test_a_window_counts_what_it_sees(sequence: int, window: int) -> None:
    """Positions seen, counted one by one, less half of one: the diagonal is half seen, as in S/2."""
    seen = np.mean([min(t + 1, window) for t in range(sequence)]) - min(window, sequence) / (2 * sequence)
    base = Decoder(BASE).flops_per_token(0)
    got = Decoder(replace(BASE, window=window)).flops_per_token(sequence)
    assert got - base == pytest.approx(12 * 3 * 4 * 8 * seen, rel=1e-6)


def test_experts_count_as_often_as_a_token_uses_them() -> None:
    """A router and two of eight experts of width 12 have the matrices of one MLP of width 24 and of the router."""
    experts = replace(BASE, experts=ExpertConfig(count=8, top=2, mlp=12))
    dense = Decoder(replace(BASE, mlp=24)).flops_per_token(32)
    assert Decoder(experts).flops_per_token(32) == pytest.approx(dense + 6 * BASE.layers * BASE.embed * 8)


@pytest.mark.parametrize(
    ("name", "all_of_them", "used"), [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)]
)
def test_the_published_parameters_of_gpt_oss(name: str, all_of_them: float, used: float) -> None:
    """Table 1 of the model card (https://arxiv.org/abs/2508.10925). The active ones are without the embedding."""
    size = SIZES[name]
    assert parameter_count(size) == count(Decoder(size).specs()) == pytest.approx(all_of_them, rel=5e-4)
    assert size.experts is not None
    # parameter_count also has the biases, of which a token uses as large a share as of the experts.
    biases = size.layers * (2 * size.experts.mlp + size.embed) * (size.experts.count - size.experts.top)
    active = parameter_count(size) - matrix_count(size) + active_matrix_count(size) - biases - size.vocab * size.embed
    assert active == pytest.approx(used, rel=5e-3)


def test_a_shared_expert_counts_for_every_token() -> None:
    """It has the matrices of one MLP of the model's width, and a gate."""
    alone = Decoder(replace(BASE, experts=ExpertConfig(count=8, top=2, mlp=12))).flops_per_token(32)
    both = Decoder(replace(BASE, experts=ExpertConfig(count=8, top=2, mlp=12, shared=True))).flops_per_token(32)
    assert both == pytest.approx(alone + 6 * BASE.layers * BASE.embed * (3 * BASE.mlp + 1))


@pytest.mark.torch
def test_the_parameters_of_qwen3_5_35b_a3b_are_those_of_transformers() -> None:
    """The defaults of transformers' configuration are the dimensions of Qwen3.5-35B-A3B."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    with torch.device("meta"):
        reference = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig())
    size = SIZES["qwen3.5-35b-a3b"]
    expected = sum(one.numel() for one in reference.parameters())
    assert parameter_count(size) == count(Decoder(size).specs()) == expected == 34_660_610_688
    active = parameter_count(size) - matrix_count(size) + active_matrix_count(size)
    unused = sum(one.numel() for name, one in reference.named_parameters() if ".experts." in name) * 248 // 256
    assert active == expected - unused


def test_the_published_parameters_of_qwen3_30b_a3b() -> None:
    """30.5B in all, 3.3B active (https://huggingface.co/Qwen/Qwen3-30B-A3B-Base)."""
    size = SIZES["qwen3-30b-a3b"]
    assert parameter_count(size) == count(Decoder(size).specs()) == 30_532_122_624
    active = parameter_count(size) - matrix_count(size) + active_matrix_count(size)
    assert active == pytest.approx(3.35e9, rel=0.005)
