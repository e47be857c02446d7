from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from forerun.config.schema import Optimizer
from forerun.models.decoder import Decoder
from forerun.models.sizes import DecoderConfig
from forerun.nn import spec
from forerun.program import optimizer

STEPS, WARMUP = 50, 8


def formula(o: Optimizer, step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return o.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[o.schedule]
    final = 1.0 if o.schedule == "constant" else o.final_lr
    return o.lr * (final + (1 - final) * shape)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
def test_schedule_is_the_formula(shape: Any, warmup: int) -> None:
    o = Optimizer(lr=3e-3, schedule=shape, final_lr=0.2)
    rate = optimizer.schedule(o, STEPS, warmup)
    got = [float(optimizer.rate_at(rate, jnp.asarray(step, jnp.int32))) for step in range(STEPS + 5)]
    np.testing.assert_allclose(got, [formula(o, step, STEPS, warmup) for step in range(STEPS + 5)], rtol=1e-5)
    assert min(got) > 0
    assert max(got) == pytest.approx(3e-3)


def test_warm_up_as_long_as_the_run() -> None:
    rate = optimizer.schedule(Optimizer(lr=1.0), 10, 10)
    np.testing.assert_allclose([rate(step) for step in range(10)], np.arange(1, 11) / 10, rtol=1e-6)


def adamw(
    o: Optimizer, gradients: list[np.ndarray], weight: np.ndarray, rates: list[float], decay: float
) -> np.ndarray:
    """Loshchilov and Hutter's algorithm, in float64."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        first, second = o.b1 * first + (1 - o.b1) * g, o.b2 * second + (1 - o.b2) * g**2
        step = (first / (1 - o.b1**t)) / (np.sqrt(second / (1 - o.b2**t)) + o.eps)
        weight = weight - lr * (step + decay * weight)
    return weight


def test_steps_are_adamw_with_clipping() -> None:
    """Decay on `matrix` only; the second gradient is longer than the limit, over both leaves together."""
    o = Optimizer(lr=0.1, weight_decay=0.3, clip=1.0, b1=0.8, b2=0.9, eps=1e-4)
    rate = optimizer.schedule(o, 4, 2)
    tx = optimizer.chain(o, rate, {"matrix": True, "bias": False})
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(2, 3)), "bias": rng.normal(size=3)}
    gradients = [{name: scale * rng.normal(size=x.shape) for name, x in start.items()} for scale in (0.1, 10.0, 0.2)]
    params: Any = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    moments = tx.init(params)
    for g in gradients:
        params, moments = optimizer.update(tx, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g), moments, params)

    norms = [math.sqrt(sum((x**2).sum() for x in g.values())) for g in gradients]
    assert norms[0] < 1 < norms[1]
    clipped = [{name: x / max(1.0, norm) for name, x in g.items()} for g, norm in zip(gradients, norms, strict=True)]
    rates = [formula(o, step, 4, 2) for step in range(3)]
    for name, decay in (("matrix", 0.3), ("bias", 0.0)):
        expected = adamw(o, [g[name] for g in clipped], start[name], rates, decay)
        np.testing.assert_allclose(params[name], expected, rtol=1e-5, err_msg=name)


def test_without_a_limit_nothing_is_clipped() -> None:
    o = Optimizer(clip=None, weight_decay=0.0)
    tx = optimizer.chain(o, optax.constant_schedule(1.0), {"w": True})
    params = {"w": jnp.zeros(2)}
    _, moments = optimizer.update(tx, {"w": jnp.array([300.0, 400.0])}, tx.init(params), params)
    first = next(s.mu for s in jax.tree.leaves(moments, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    np.testing.assert_allclose(first["w"], [30.0, 40.0], rtol=1e-6)


def test_decay_leaves_norms_and_biases_alone() -> None:
    config = DecoderConfig(2, 16, 2, 1, 8, 32, 64, tied=False, qkv_bias=True, qk_norm=True)
    decays = spec.map_specs(lambda s: s.decay, Decoder(config).specs())
    spared = {jax.tree_util.keystr(path) for path, decay in jax.tree_util.tree_leaves_with_path(decays) if not decay}
    norms = {".norm", *(f".blocks.{name}_norm" for name in ("attention", "mlp", "query", "key"))}
    assert spared == norms | {f".blocks.{name}_bias" for name in ("query", "key", "value")}


def test_average() -> None:
    average, params = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -2.0])}
    np.testing.assert_allclose(optimizer.averaged(average, params, 0.75)["w"], [1.5, 1.0], rtol=1e-6)
