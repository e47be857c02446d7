from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.objectives.cross_entropy import chunk_length, cross_entropy, token_nats
from forerun.program.build import make_mesh

B, S, E, V = 8, 12, 16, 40
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(seed: int = 0, vocab: int = V) -> Arrays:
    rng = np.random.default_rng(seed)
    hidden, matrix = rng.normal(size=(B, S, E)), rng.normal(size=(vocab, E))
    targets = rng.integers(0, vocab, (B, S))
    targets[0, :2] = 0, vocab - 1
    weights = rng.random((B, S)) * (rng.random((B, S)) < 0.7)
    weights[1] = 0
    return hidden.astype(np.float32), matrix.astype(np.float32), targets.astype(np.int32), weights.astype(np.float32)


def plain(hidden: np.ndarray, matrix: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> tuple[Any, ...]:
    """(loss, gradient of hidden, gradient of matrix), by the textbook, in float64."""
    hidden, matrix, weights = (x.astype(np.float64) for x in (hidden, matrix, weights))
    logits = hidden @ matrix.T
    logits -= logits.max(axis=-1, keepdims=True)
    likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -(np.take_along_axis(likely, targets[..., None], axis=-1)[..., 0] * weights).sum()
    slope = (np.exp(likely) - np.eye(matrix.shape[0])[targets]) * weights[..., None]
    return loss, slope @ matrix, np.einsum("bsv,bse->ve", slope, hidden)


def computed(arrays: Arrays, chunk: int) -> tuple[Any, ...]:
    loss, (hidden, matrix) = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)), static_argnums=4)(
        *arrays, chunk
    )
    return loss, hidden, matrix


def assert_same(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    for name, have, want in zip(("hidden", "matrix"), got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-6 * np.abs(want).max() + 1e-6, err_msg=name)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 100])
def test_value_and_gradients(chunk: int) -> None:
    arrays = drawn()
    assert_same(computed(arrays, chunk), plain(*arrays))
    np.testing.assert_allclose(jax.jit(cross_entropy, static_argnums=4)(*arrays, chunk), plain(*arrays)[0], rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_the_nats_of_every_token_and_their_gradients(chunk: int) -> None:
    hidden, matrix, targets, weights = drawn()

    def weighed(hidden: Any, matrix: Any) -> Any:
        return jnp.sum(token_nats(hidden, matrix, targets, chunk) * weights)

    loss, (hidden_gradient, matrix_gradient) = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1)))(hidden, matrix)
    assert_same((loss, hidden_gradient, matrix_gradient), plain(hidden, matrix, targets, weights))
    nats = np.array(jax.jit(token_nats, static_argnums=3)(hidden, matrix, targets, chunk))
    for row, place in ((0, 0), (0, 1), (1, 3), (7, 11)):
        alone = np.zeros((B, S), np.float32)
        alone[row, place] = 1
        np.testing.assert_allclose(nats[row, place], plain(hidden, matrix, targets, alone)[0], rtol=1e-5)


def test_the_cotangent_scales_the_gradients() -> None:
    arrays = drawn()
    gradient = jax.grad(lambda h: -3 * cross_entropy(h, *arrays[1:], 5))(jnp.asarray(arrays[0]))
    np.testing.assert_allclose(gradient, -3 * plain(*arrays)[1], rtol=0, atol=1e-4)


def test_weights_of_zero() -> None:
    hidden, matrix, targets, weights = drawn()
    loss, to_hidden, to_matrix = computed((hidden, matrix, targets, np.zeros_like(weights)), 5)
    assert float(loss) == 0
    assert not np.any(to_hidden)
    assert not np.any(to_matrix)
    hidden[1] = 1e4  # a row that weighs nothing, however large
    assert_same(computed((hidden, matrix, targets, weights), 5), plain(hidden, matrix, targets, weights))


def test_large_logits_stay_finite() -> None:
    hidden, matrix, targets, weights = drawn()
    arrays = (100 * hidden, matrix, targets, weights)
    loss, to_hidden, _ = computed(arrays, 5)
    np.testing.assert_allclose(loss, plain(*arrays)[0], rtol=1e-5)
    assert np.isfinite(to_hidden).all()


def test_bfloat16_sums_in_float32() -> None:
    hidden, matrix, targets, weights = drawn()
    narrow = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(matrix, jnp.bfloat16)
    loss, to_hidden, to_matrix = computed((*narrow, targets, weights), 4)
    assert (loss.dtype, to_hidden.dtype, to_matrix.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    expected = plain(*(np.asarray(x, np.float32) for x in narrow), targets, weights)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for have, want in zip((to_hidden, to_matrix), expected[1:], strict=True):
        assert np.linalg.norm(have.astype(jnp.float32) - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("vocab", [40, 39], ids=["even", "odd"])
def test_on_eight_devices(shape: tuple[int, ...], vocab: int) -> None:
    arrays = drawn(vocab=vocab)
    data, fsdp, tp, *context = shape
    mesh = make_mesh(MeshShape(data, fsdp, tp, context=math.prod(context)), jax.devices())
    with jax.set_mesh(mesh):
        assert_same(computed(arrays, 5), plain(*arrays))
        np.testing.assert_allclose(jax.jit(cross_entropy, static_argnums=4)(*arrays, 5), plain(*arrays)[0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 2, 2, 2)], ids=str)
def test_the_nats_on_eight_devices(shape: tuple[int, ...]) -> None:
    hidden, matrix, targets, weights = drawn()
    data, fsdp, tp, *context = shape
    mesh = make_mesh(MeshShape(data, fsdp, tp, context=math.prod(context)), jax.devices())

    def weighed(hidden: Any, matrix: Any) -> Any:
        return jnp.sum(token_nats(hidden, matrix, targets, 5) * weights)

    with jax.set_mesh(mesh):
        loss, gradients = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1)))(hidden, matrix)
    assert_same((loss, *gradients), plain(hidden, matrix, targets, weights))


def sizes_in(jaxpr: Any) -> set[int]:
    """The elements of every value that a program makes, its inner programs included."""
    found = {v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")}
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= sizes_in(inner)
    return found


def test_the_full_logits_never_exist() -> None:
    rows, length, width, vocab = 2, 64, 8, 512
    arrays = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.float32),
    )

    def naive(hidden: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        likely = jax.nn.log_softmax(hidden @ matrix.T)
        return -jnp.sum(jnp.take_along_axis(likely, targets[..., None], axis=-1)[..., 0] * weights)

    def chunked(hidden: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy(hidden, matrix, targets, weights, 8)

    def by_token(hidden: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(token_nats(hidden, matrix, targets, 8) * weights)

    logits = rows * length * vocab
    largest, temporary_bytes = {}, {}
    for function in (naive, chunked, by_token):
        traced = jax.jit(jax.value_and_grad(function, argnums=(0, 1))).trace(*arrays)
        largest[function.__name__] = max(sizes_in(traced.jaxpr))
        memory = traced.lower().compile().memory_analysis()
        temporary_bytes[function.__name__] = memory.temp_size_in_bytes
    assert largest["naive"] == logits
    assert max(largest["chunked"], largest["by_token"]) <= logits // 8
    assert temporary_bytes["naive"] >= 4 * logits
    assert max(temporary_bytes["chunked"], temporary_bytes["by_token"]) < 4 * logits / 2


@pytest.mark.parametrize(
    ("sequence", "rows", "vocab", "limit_bytes", "expected"),
    [
        (1024, 4, 151_936, 512 << 20, 128),  # 220 positions fit; 128 is the longest divisor of 1024 below
        (1024, 1, 256, 512 << 20, 1024),  # all at once
        (8192, 64, 151_936, 1, 1),  # never none
        (1000, 1, 1, 4 * 300, 250),
        (1009, 1, 1, 4 * 300, 253),  # a prime: four equal chunks with 3 positions of padding, not 1009 of one
    ],
)
def test_chunk_length(sequence: int, rows: int, vocab: int, limit_bytes: int, expected: int) -> None:
    assert chunk_length(sequence, rows, vocab, limit_bytes) == expected


def test_chunk_length_keeps_the_limit() -> None:
    for sequence in range(1, 200):
        for fits in (1, 7, 64, 150):
            chunk = chunk_length(sequence, 3, 11, 4 * 3 * 11 * fits)
            assert 1 <= chunk <= min(sequence, fits)
            assert -sequence % chunk < max(1, -(-sequence // fits))
