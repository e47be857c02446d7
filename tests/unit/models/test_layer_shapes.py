"""Layers of different shapes: stacks, tables, caches, and equality with the same layers in one stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import Remat
from forerun.hardware.mesh import MeshShape
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.llama import LLAMA_TABLE
from forerun.models.keys import Stack, entries, table_path
from forerun.models.layer_kinds import LayerKind, LayerShape, sections
from forerun.models.parameter_axes import matrix_count, parameter_count
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.kv_cache import LayerCaches, RecurrentCache
from forerun.nn.rope import Rope
from forerun.program.build import make_mesh

NEAR = LayerKind(4, Rope(100.0, 8))
FAR = LayerKind(None, Rope(1000.0, 8))
SLIDING, FULL = LayerShape("sliding"), LayerShape("full")
# Two periods of two local layers and a global one, a tail of one layer, and a last layer of another pattern.
PLAIN = DecoderConfig(8, 16, 4, 2, 8, 24, 50, qk_norm=True, kinds=(NEAR, NEAR, FAR), last_layers=1, last_kinds=(FAR,))
SHAPED = replace(
    PLAIN,
    kinds=(replace(NEAR, shape=SLIDING), replace(NEAR, shape=SLIDING), replace(FAR, shape=FULL)),
    last_kinds=(replace(FAR, shape=FULL),),
)
NUMBERS = {
    "blocks.sliding": (0, 1, 3, 4),
    "blocks.full": (2, 5),
    "tail.sliding": (6,),
    "last.full": (7,),
}
WIDE = replace(  # each shape has its own heads, head dimension and MLP
    SHAPED,
    kinds=(
        *SHAPED.kinds[:2],
        replace(FAR, rope=Rope(1000.0, 12), shape=LayerShape("full", kv_heads=1, head_dim=12, mlp=40)),
    ),
    last_layers=0,
    last_kinds=(),
)


def by_layer(params: Any, model: Decoder) -> list[Any]:
    """Return the parameters of every layer, in the order of the model."""
    found: dict[int, Any] = {}
    for stack in model.stacks:
        part = params
        for name in stack.name.split("."):
            part = part[name] if isinstance(part, dict) else getattr(part, name)
        for n, number in enumerate(stack.numbers):
            found[number] = jax.tree.map(lambda leaf, n=n: np.asarray(leaf)[n], part)
    return [found[number] for number in sorted(found)]


def stacked(layers: list[Any], numbers: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(layers[number] for number in numbers))


def same_in_shapes(params: Any) -> Any:
    """Return the parameters of the plain model in the stacks of the model with shapes."""
    layers = by_layer(params, Decoder(PLAIN))
    parts: dict[str, Any] = {}
    for name, numbers in NUMBERS.items():
        section, _, shape = name.partition(".")
        parts.setdefault(section, {})[shape] = stacked(layers, numbers)
    return replace(params, **parts)


def random_params(model: Decoder) -> Any:
    rng = np.random.default_rng(1)
    return spec.map_specs(lambda s: rng.normal(not s.decay, 0.3, s.shape).astype("f"), model.specs())


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(2)
    segments = np.repeat([[1] * 7 + [2] * 9 + [0] * 2], 2, axis=0)
    positions = np.repeat([[*range(7), *range(9), 0, 1]], 2, axis=0)
    return tuple(jnp.asarray(x, jnp.int32) for x in (rng.integers(0, 50, (2, 18)), segments, positions))  # type: ignore


def test_sections() -> None:
    named = [(s.name, s.first, s.layers, s.scanned) for s in PLAIN.sections]
    assert named == [("blocks", 0, 6, True), ("tail", 6, 1, False), ("last", 7, 1, True)]
    assert [s.name for s in sections(3, PLAIN.kinds, 3, (FAR, NEAR))] == ["blocks", "last", "last_tail"]
    assert [s.name for s in sections(6, PLAIN.kinds, 0, ())] == ["blocks"]
    assert [(s.name, s.layers, s.scanned) for s in sections(2, PLAIN.kinds, 0, ())] == [("blocks", 2, False)]
    assert PLAIN.all_kinds == [NEAR, NEAR, FAR, NEAR, NEAR, FAR, NEAR, FAR]


def test_stacks_and_table() -> None:
    model = Decoder(SHAPED)
    assert {stack.name: stack.numbers for stack in model.stacks} == NUMBERS
    table = [one for one in LLAMA_TABLE if "bias" not in one.name]
    specs = Decoder(replace(SHAPED, qk_norm=False)).specs()
    names = [entry.name for entry in entries(table, specs, model.stacks)]
    assert [name for name in names if name.endswith("q_proj.weight")] == [
        f"model.layers.{n}.self_attn.q_proj.weight" for n in range(8)
    ]


def test_a_stack_lacks_a_leaf() -> None:
    """A layer that takes its values from its keys has no tensor for values."""
    shape = LayerShape("full", key_is_value=True)
    model = Decoder(replace(SHAPED, qk_norm=False, kinds=(*SHAPED.kinds[:2], replace(FAR, shape=shape)), last_layers=0))
    names = [entry.name for entry in entries(LLAMA_TABLE, model.specs(), model.stacks)]
    assert "model.layers.1.self_attn.v_proj.weight" in names
    assert "model.layers.2.self_attn.v_proj.weight" not in names
    assert "model.layers.2.self_attn.k_proj.weight" in names


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("blocks.query", "blocks.query"),
        ("tail.query.value", "blocks.query.value"),
        ("last_tail.full.query", "blocks.query"),
        ("blocks.sliding.delta.qkv", "blocks.delta.qkv"),
        ("head.value", "head.value"),
        ("towers.full.query", "towers.full.query"),
        ("blocks", "blocks"),
    ],
)
def test_table_path(path: str, expected: str) -> None:
    assert table_path(path) == expected


def test_path_of_a_stack() -> None:
    assert Stack("tail.full", (3,)).path("blocks.query") == "tail.full.query"


@pytest.mark.parametrize("config", [PLAIN, SHAPED, WIDE], ids=["plain", "shaped", "wide"])
def test_counts_without_jax(config: DecoderConfig) -> None:
    leaves = jax.tree.leaves(Decoder(config).specs(), is_leaf=spec.is_spec)
    assert parameter_count(config) == sum(leaf.size for leaf in leaves)
    assert matrix_count(config) == sum(leaf.size for leaf in leaves if leaf.decay) - config.vocab * config.embed


def test_shapes_of_wide_layers() -> None:
    blocks = Decoder(WIDE).specs().blocks
    assert isinstance(blocks, dict)
    assert blocks["full"].query.value.shape == (2, 16, 4, 12)
    assert blocks["full"].key.value.shape == (2, 16, 1, 12)
    assert blocks["full"].up.value.shape == (2, 16, 40)
    assert blocks["sliding"].key.value.shape == (4, 16, 2, 8)


def test_equals_one_stack() -> None:
    """Logits and gradients of the same weights in stacks by shape and in one stack, with the same dimensions."""
    plain, shaped = Decoder(PLAIN), Decoder(SHAPED)
    params, compute = random_params(plain), Compute(remat=Remat(policy="full"))
    pull = jnp.asarray(np.random.default_rng(3).normal(size=(2, 18, 50)), jnp.float32)

    def loss(model: Decoder, params: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(params, *batch(), compute).logits()
        return jnp.sum(logits * pull), logits

    run = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=0)
    (_, expected), expected_pull = run(plain, params)
    (_, got), got_pull = run(shaped, same_in_shapes(params))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    for have, want in zip(jax.tree.leaves(got_pull), jax.tree.leaves(same_in_shapes(expected_pull)), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4 * float(jnp.abs(want).max()) + 1e-6)


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("config", [pytest.param(SHAPED, marks=pytest.mark.slow), WIDE], ids=["shaped", "wide"])
def test_cache(config: DecoderConfig, apart: bool) -> None:
    """A prompt and single tokens through the caches give the logits of the complete text."""
    model = Decoder(config)
    params = jax.tree.map(jnp.asarray, random_params(model))
    tokens = batch()[0][:, :12]
    places = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    expected = jax.jit(lambda p: model.apply(p, tokens, jnp.ones_like(tokens), places, Compute()).logits())(params)
    specs = model.cache(2, 12, jnp.float32)
    assert isinstance(specs, LayerCaches)
    if apart:
        params, specs = model.unstacked(params), specs.apart()
    cache = spec.map_specs(lambda s: jnp.zeros(s.shape, s.dtype), specs)

    @jax.jit
    def extend(tokens: jax.Array, places: jax.Array, cache: Any) -> Any:
        readout, cache = model.extend(params, tokens, places, cache, Compute())
        return readout.logits(), cache

    got, cache = extend(tokens[:, :9], places[:, :9], cache)
    np.testing.assert_allclose(got, expected[:, :9], atol=2e-5)
    for n in range(9, 12):
        got, cache = extend(tokens[:, n : n + 1], places[:, n : n + 1], cache)
        np.testing.assert_allclose(got, expected[:, n : n + 1], atol=2e-5)


def test_layers_of_the_cache() -> None:
    specs = Decoder(WIDE).cache(3, 20, jnp.float32)
    assert isinstance(specs, LayerCaches)
    shapes = {name: part.keys.shape for name, part in specs.parts.items()}  # type: ignore[union-attr]
    assert shapes == {"sliding": (6, 3, 2, 20, 8), "full": (2, 3, 1, 20, 12)}


def test_recurrent_cache() -> None:
    stacked = RecurrentCache({"state": jnp.arange(24.0).reshape(2, 3, 4)})
    np.testing.assert_array_equal(stacked.layer(1)["state"], jnp.arange(12.0, 24.0).reshape(3, 4))
    specs = RecurrentCache({"state": spec.ParamSpec((2, 3, 4), "LBE", spec.Fill(0.0))}).apart()
    assert [one.shape for one in specs.states["state"]] == [(3, 4), (3, 4)]
    apart = RecurrentCache({"state": (jnp.zeros((3, 4)), jnp.ones((3, 4)))})
    assert float(apart.layer(1)["state"].sum()) == 12.0


def test_on_a_mesh() -> None:
    model = Decoder(WIDE)
    params = random_params(model)
    expected = jax.jit(lambda p: model.apply(p, *batch(), Compute()).logits())(params)
    mesh = make_mesh(MeshShape(data=1, fsdp=2, tp=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        got = jax.jit(lambda p: model.apply(p, *batch(), Compute()).logits())(params)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_flops_count_each_shape() -> None:
    """6 per element of a matrix, and 12 x heads x head dimension x visible positions per layer."""
    sequence = 16
    near, far = 4 * (1 - 4 / 32), sequence / 2
    matrices = matrix_count(WIDE) + 50 * 16
    assert Decoder(WIDE).flops_per_token(sequence) == pytest.approx(
        6 * matrices + 12 * (6 * 4 * 8 * near + 2 * 4 * 12 * far)
    )
