"""The soft losses against torch, which has all logits at once, its own kl_div and its own derivatives, in float64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.models.base import Readout
from forerun.objectives.distil import (
    HIDDEN,
    IDS,
    MATRIX,
    TAIL,
    TARGETS,
    VALUES,
    CachedTeacherLoss,
    LiveTeacherLoss,
    Rule,
    chunked,
    sampled,
)
from forerun.program.build import make_mesh
from forerun.program.recording import record

B, S, E, D, V = 8, 12, 16, 20, 40
CHUNK = 5
Drawn = dict[str, np.ndarray]


def drawn(vocab: int = V, theirs: int | None = None) -> Drawn:
    rng = np.random.default_rng(0)
    weights = rng.random((B, S)) * (rng.random((B, S)) < 0.7)
    weights[1] = 0
    made: Drawn = {
        "hidden": rng.normal(size=(B, S, E)),
        "matrix": rng.normal(size=(vocab, E)),
        "weights": weights,
        "teacher_hidden": rng.normal(size=(B, S, D)),
        "teacher_matrix": rng.normal(size=(theirs or vocab, D)),
    }
    made = {name: array.astype(np.float32) for name, array in made.items()}
    return {**made, "targets": rng.integers(0, min(vocab, theirs or vocab), (B, S)).astype(np.int32)}


def torch_loss(
    x: Drawn, soft: float, temperature: float, softcap: float | None = None, ids: np.ndarray | None = None
) -> tuple[float, np.ndarray, np.ndarray]:
    """(loss, gradient of hidden, gradient of matrix). With `ids`, all tokens but these are one bucket."""
    import torch
    import torch.nn.functional as functional

    hidden, matrix, weights, there, table = (
        torch.tensor(x[name].astype(np.float64))
        for name in ("hidden", "matrix", "weights", "teacher_hidden", "teacher_matrix")
    )
    hidden.requires_grad_(), matrix.requires_grad_()
    logits, teacher = hidden @ matrix.T, there @ table.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    hard = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.tensor(x["targets"]).long().reshape(-1),
                           reduction="none").reshape(B, S)  # fmt: skip
    log_q, log_p = functional.log_softmax(logits / temperature, -1), functional.log_softmax(teacher / temperature, -1)
    if ids is not None:
        log_q, log_p = (bucketed(x, torch.tensor(ids).long()) for x in (log_q, log_p))
    common = log_p.shape[-1]
    kl = functional.kl_div(log_q[..., :common], log_p, reduction="none", log_target=True).sum(-1)
    loss = (weights * ((1 - soft) * hard + soft * temperature**2 * kl)).sum()
    loss.backward()
    return float(loss.detach()), hidden.grad.numpy(), matrix.grad.numpy()


def bucketed(log_p: Any, ids: Any) -> Any:
    import torch

    kept = torch.gather(log_p, -1, ids)
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([kept, rest], -1)


def computed(rule: Rule, x: Drawn, sides: dict[str, Any], tables: dict[str, Any], softcap: float | None = None) -> Any:
    def loss(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
        every = {TARGETS: x["targets"], **sides}
        return chunked(rule, hidden, matrix, jnp.asarray(x["weights"]), every, tables, CHUNK, softcap)["loss"]

    loss, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x["hidden"], x["matrix"])
    return loss, *gradients


def beside(x: Drawn, soft: float, temperature: float, softcap: float | None = None) -> Any:
    vocab, theirs = len(x["matrix"]), len(x["teacher_matrix"])
    matrix = np.concatenate([x["teacher_matrix"], np.zeros((max(0, vocab - theirs), D), np.float32)])[:vocab]
    rule = LiveTeacherLoss(soft, temperature, theirs)
    return computed(rule, x, {HIDDEN: x["teacher_hidden"]}, {MATRIX: matrix}, softcap)


def kept(x: Drawn, top_k: int, temperature: float, *, exact: bool) -> dict[str, np.ndarray]:
    """As it would be written down; `exact`: before its values are rounded to 16 bits."""
    out = Readout(jnp.asarray(x["teacher_hidden"]), jnp.asarray(x["teacher_matrix"]))
    values, ids, tails = (
        np.asarray(one) for one in record(out, vocab=V, top_k=top_k, temperatures=(temperature,), chunk=CHUNK)
    )
    if exact:
        logits = x["teacher_hidden"] @ x["teacher_matrix"].T
        values = np.take_along_axis(logits, ids, -1)
        values = values - values[..., :1]
    return {VALUES: values, IDS: ids, TAIL: tails[..., 0]}


def assert_same(got: Any, expected: Any, near: float = 1e-5) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=near)
    for name, have, want in zip(("hidden", "matrix"), got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=near * np.abs(want).max(), err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize(("soft", "temperature", "softcap"), [(1.0, 1.0, None), (0.3, 2.5, None), (0.7, 0.8, 3.0)])
def test_a_teacher_beside_is_torch_with_all_logits(soft: float, temperature: float, softcap: float | None) -> None:
    x = drawn()
    assert_same(beside(x, soft, temperature, softcap), torch_loss(x, soft, temperature, softcap))


@pytest.mark.torch
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_whole_vocabulary_written_down_is_torch_with_all_logits(temperature: float) -> None:
    x = drawn()
    sides = kept(x, V, temperature, exact=True)
    assert not sides[TAIL].any()
    assert_same(computed(CachedTeacherLoss(0.6, temperature), x, sides, {}), torch_loss(x, 0.6, temperature))


@pytest.mark.torch
@pytest.mark.parametrize("top_k", [1, 4, 16, V - 1])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_rest_is_one_bucket(top_k: int, temperature: float) -> None:
    x = drawn()
    sides = kept(x, top_k, temperature, exact=True)
    got = computed(CachedTeacherLoss(0.6, temperature), x, sides, {})
    assert_same(got, torch_loss(x, 0.6, temperature, ids=sides[IDS]))


@pytest.mark.torch
def test_sixteen_bits_are_near() -> None:
    x = drawn()
    got = computed(CachedTeacherLoss(1.0, 1.0), x, kept(x, V, 1.0, exact=False), {})
    assert_same(got, torch_loss(x, 1.0, 1.0), near=1e-3)


@pytest.mark.torch
@pytest.mark.parametrize("theirs", [V - 3])
def test_a_teacher_with_a_smaller_table_says_nothing_beyond_it(theirs: int) -> None:
    x = drawn(theirs=theirs)
    assert_same(beside(x, 1.0, 1.0), torch_loss(x, 1.0, 1.0))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("vocab", [40, 39], ids=["even", "odd"])
def test_soft_losses_on_eight_devices(shape: tuple[int, ...], vocab: int) -> None:
    x = drawn(vocab)
    sides = kept({**x, "teacher_matrix": x["teacher_matrix"][:39]}, 6, 2.0, exact=False)
    alone = beside(x, 0.4, 2.0), computed(CachedTeacherLoss(0.4, 2.0), x, sides, {})
    data, fsdp, tp, *context = shape
    mesh = make_mesh(MeshShape(data, fsdp, tp, context=math.prod(context)), jax.devices())
    with jax.set_mesh(mesh):
        assert_same(beside(x, 0.4, 2.0), alone[0], near=1e-6)
        assert_same(computed(CachedTeacherLoss(0.4, 2.0), x, sides, {}), alone[1], near=1e-6)


def test_what_is_written_down() -> None:
    x = drawn()
    logits = (x["teacher_hidden"] @ x["teacher_matrix"].T).astype(np.float64)
    out = Readout(jnp.asarray(x["teacher_hidden"]), jnp.asarray(x["teacher_matrix"]))
    values, ids, tails = (
        np.asarray(one) for one in record(out, vocab=V, top_k=7, temperatures=(1.0, 3.0), chunk=CHUNK)
    )
    assert (values.dtype, ids.dtype, tails.dtype, tails.shape) == (np.float16, np.int32, np.float32, (B, S, 2))
    order = np.argsort(-logits, axis=-1)[..., :7]
    np.testing.assert_array_equal(ids, order)
    top = np.take_along_axis(logits, order, -1)
    np.testing.assert_allclose(values, top - top[..., :1], rtol=1e-3, atol=1e-6)
    for number, temperature in enumerate((1.0, 3.0)):
        powers = np.exp(logits / temperature)
        np.put_along_axis(powers, order, 0.0, -1)
        np.testing.assert_allclose(tails[..., number], powers.sum(-1) / np.exp(logits / temperature).sum(-1), rtol=1e-4)


def test_ties_at_the_edge_are_not_lost() -> None:
    """Five tokens as likely as one another, of which two are kept: three fifths are left."""
    out = Readout(jnp.ones((1, 1, 1)), jnp.array([[0.0], [0.0], [0.0], [0.0], [0.0], [-100.0]]))
    _, _, tails = record(out, vocab=6, top_k=2, temperatures=(1.0,), chunk=1)
    np.testing.assert_allclose(tails, 0.6, rtol=1e-6)


def test_a_cpu_does_not_sort_the_vocabulary() -> None:
    """XLA's TopK routine takes 1/28 of the time of the sort that it replaces. Which one it is, the program says."""
    x = drawn()

    def made(hidden: jax.Array, matrix: jax.Array) -> Any:
        return record(Readout(hidden, matrix, None), vocab=V, top_k=4, temperatures=(1.0, 2.0), chunk=CHUNK)

    program = jax.jit(made).lower(x["hidden"], x["matrix"]).compile().as_text()
    assert 'custom_call_target="TopK"' in program
    assert " sort(" not in program


def test_a_sample_follows_from_the_row_and_covers_all_positions() -> None:
    rng = np.random.default_rng(1)
    counts = np.zeros(64)
    for _ in range(40):
        tokens = jnp.asarray(rng.integers(0, 100, (16, 64)), jnp.int32)
        at = np.asarray(sampled(tokens, 0.25, 0))
        assert at.shape == (16, 16)
        assert (np.diff(at, axis=1) > 0).all()
        np.testing.assert_array_equal(at[3:5], sampled(tokens[3:5], 0.25, 0))
        counts += np.bincount(at.ravel(), minlength=64)
    assert counts.sum() == 40 * 16 * 16
    assert counts.min() > 100  # 160 expected
    np.testing.assert_array_equal(sampled(tokens, 1.0, 0), np.tile(np.arange(64), (16, 1)))


@pytest.mark.parametrize("kind", ["beside", "written down"])
def test_the_full_logits_of_neither_model_exist(kind: str) -> None:
    rows, length, width, vocab = 2, 64, 8, 512

    def loss(hidden: jax.Array, matrix: jax.Array, weights: jax.Array, targets: jax.Array) -> jax.Array:
        sides: dict[str, jax.Array] = {TARGETS: targets, HIDDEN: hidden}
        tables, rule = {MATRIX: matrix}, LiveTeacherLoss(0.5, 2.0, vocab)
        if kind == "written down":
            ids = jnp.broadcast_to(jnp.arange(4), (rows, length, 4))
            sides = {TARGETS: targets, VALUES: -ids.astype(jnp.float16), IDS: ids, TAIL: 0.1 * weights}
            tables, rule = {}, CachedTeacherLoss(0.5, 2.0)  # type: ignore[assignment]
        return chunked(rule, hidden, matrix, weights, sides, tables, 8)["loss"]

    arrays = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    assert f"{rows},{length},{vocab}" not in compiled.as_text()
