"""What must make no difference: scanning, packing, accumulating, sharding, remat. Each against plain computation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import Job, Model, Optimizer, Precision, Remat
from forerun.hardware.mesh import MeshShape
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.decoder_params import Params
from forerun.nn import sharding, spec
from forerun.nn.attention import Kernel, attention
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope, angles
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import NextToken
from forerun.program.build import Program, build, make_mesh
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

VOCAB = 128
ONE = MeshShape(1, 1, 1)
TINY = DecoderConfig(
    layers=3, embed=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=VOCAB, qkv_bias=True, qk_norm=True
)


@pytest.fixture(autouse=True)
def _split_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of these models count as large, norms and biases as small, as in models of full size."""
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)


def params_of(model: Any, seed: int = 0) -> Any:
    """No norm is 1, no bias is 0, and weights large enough that attention is not flat."""
    rng = np.random.default_rng(seed)

    def leaf(one: spec.ParamSpec) -> jax.Array:
        return jnp.asarray(rng.normal(0.0 if one.decay else 1.0, 0.15, one.shape), one.dtype)

    return spec.map_specs(leaf, model.specs())


def packed(rows: int, length: int, seed: int = 0) -> Batch[np.ndarray]:
    """Rows of documents of random lengths, padding at the end, and some targets that do not count."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        start, number = 0, 1
        while start < length - 3:
            end = min(length - 3, start + int(rng.integers(3, length)))
            segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
            start, number = end, number + 1
    ids = rng.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    counted = (segments > 0) & (rng.random((rows, length)) < np.linspace(0.1, 0.9, rows)[:, None])
    return Batch(ids[:, :-1], ids[:, 1:], counted.astype(np.float32), segments, positions)


def built(shape: MeshShape, **changes: Any) -> Program:
    """kv_heads 2: with tp=8 they do not divide, and heads 8 do."""
    fields: dict[str, Any] = {
        "model": Model(layers=2, embed=32, heads=8, kv_heads=2, head_dim=8, mlp=64, vocab=VOCAB, qkv_bias=True),
        "data": "unread",
        "sequence": 32,
        "batch": 16,
        "steps": 20,
        "precision": Precision(compute="float32"),
        "optimizer": Optimizer(lr=3e-3, warmup=4.0, eps=1e-6),
    } | changes
    job = Job(**fields)
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


def run(program: Program, batches: list[Batch[np.ndarray]]) -> tuple[list[Any], list[Any]]:
    """(states as numpy before and after each step, metrics)."""
    step = program.trace().lower().compile()
    state = program.initial_state(0)
    states, metrics = [jax.tree.map(np.array, state)], []
    for batch in batches:
        given = jax.tree.map(lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding), batch, program.batch)
        state, told = step(state, given, program.placed_schedule())
        states.append(jax.tree.map(np.array, state))
        metrics.append(jax.tree.map(np.array, told))
    return states, metrics


def assert_near(got: Any, expected: Any, relative: float) -> None:
    """By the norm of each leaf: an entry that is zero but for rounding has no relative error of its own."""
    for (path, have), want in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)  # the guard's flag is a bool
        error = np.linalg.norm(have - want) / (np.linalg.norm(want) + 1e-12)
        assert error < relative, f"{jax.tree_util.keystr(path)}: {error:.3g}"


def test_scanned_is_unrolled() -> None:
    model = Decoder(TINY)
    params, batch = params_of(model), packed(2, 20)
    batch = jax.tree.map(jnp.asarray, batch)

    def plain(params: Params[jax.Array]) -> jax.Array:
        x_BSE = params.embed[batch.tokens]
        turns = angles(Rope(TINY.rope_theta, TINY.head_dim), batch.positions, batch.segments)
        attend = partial(attention, segments_BS=batch.segments, window=None, kernel=Kernel("xla"))
        for i in range(TINY.layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params.blocks)
            x_BSE, _, _ = model.block(layer, x_BSE, partial(model.attention, turns=turns, attend=attend))
        mean = jnp.mean(x_BSE * x_BSE, axis=-1, keepdims=True)
        return (x_BSE / jnp.sqrt(mean + TINY.norm_eps) * params.norm) @ params.embed.T

    def scanned(params: Params[jax.Array]) -> jax.Array:
        return model.apply(params, batch.tokens, batch.segments, batch.positions, Compute()).logits()

    pull = jnp.asarray(np.random.default_rng(5).normal(size=(2, 20, VOCAB)), jnp.float32)
    expected, expected_pull = jax.jit(lambda p: (plain(p), jax.grad(lambda p: jnp.sum(plain(p) * pull))(p)))(params)
    got, got_pull = jax.jit(lambda p: (scanned(p), jax.grad(lambda p: jnp.sum(scanned(p) * pull))(p)))(params)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
    assert_near(got_pull, expected_pull, 1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [512, 4], ids=["whole", "blockwise"])
def test_packed_is_separate_documents(window: int | None, block: int) -> None:
    """Documents of 7 and 9 in one row; what the first says changes nothing in the second, to the last bit."""
    model = Decoder(DecoderConfig(**{**vars(TINY), "window": window}))
    params, compute = params_of(model), Compute(attention=Kernel("xla", block=block))
    apply = jax.jit(lambda *arrays: model.apply(*arrays, compute).logits())
    one, two = jnp.arange(7, dtype=jnp.int32)[None] * 11, jnp.arange(9, dtype=jnp.int32)[None] * 13
    places = [jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in (one, two)]
    segments = jnp.concatenate([jnp.full((1, 7), 1), jnp.full((1, 9), 2)], axis=1).astype(jnp.int32)

    def together(first: jax.Array) -> jax.Array:
        return apply(params, jnp.concatenate([first, two], axis=1), segments, jnp.concatenate(places, axis=1))

    got = together(one)
    for document, place, here in ((one, places[0], slice(0, 7)), (two, places[1], slice(7, 16))):
        alone = apply(params, document, jnp.ones_like(document), place)
        np.testing.assert_allclose(got[:, here], alone, rtol=0, atol=2e-5)

    changed = together((one + 1) % VOCAB)
    assert np.asarray(changed[:, 7:]).tobytes() == np.asarray(got[:, 7:]).tobytes()
    assert np.abs(changed[:, :7] - got[:, :7]).min(axis=-1).max() > 0


@pytest.mark.parametrize("window", [None, 5])
def test_no_position_sees_a_later_one(window: int | None) -> None:
    model = Decoder(DecoderConfig(**{**vars(TINY), "window": window}))
    params, batch = params_of(model), jax.tree.map(jnp.asarray, packed(1, 16))
    apply = jax.jit(lambda tokens: model.apply(params, tokens, ones, batch.positions, Compute()).logits())
    ones = jnp.ones_like(batch.tokens)
    before, after = apply(batch.tokens), apply(batch.tokens.at[0, 9].add(1) % VOCAB)
    changed = np.any(np.asarray(before != after), axis=-1)[0]
    assert not changed[:9].any()
    assert changed[9:].all()  # three layers reach beyond one window


def test_accumulated_is_one_large_batch() -> None:
    """Micro-batches that count unequal numbers of tokens; moments of the first step are the gradient itself."""
    batch = packed(16, 32)
    counted = batch.weights.reshape(4, 4, -1).sum(axis=(1, 2))
    assert len(set(counted.tolist())) == 4
    program = built(ONE, micro_batch=4)
    assert program.batch.tokens.shape == (4, 4, 32)
    (start, small), (small_metrics,) = run(program, [batch])
    (_, large), (large_metrics,) = run(built(ONE), [batch])
    assert_near(small, large, 1e-5)
    assert_near(small_metrics, large_metrics, 1e-6)

    def mean_loss(params: Any) -> jax.Array:
        out = program.model.apply(params, batch.tokens, batch.segments, batch.positions, Compute())
        likely = jax.nn.log_softmax(out.logits(), axis=-1)
        chosen = jnp.take_along_axis(likely, batch.targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * batch.weights) / np.sum(batch.weights)

    value, gradient = jax.jit(jax.value_and_grad(mean_loss))(start.params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(small_metrics.loss, value, rtol=1e-6)
    np.testing.assert_allclose(small_metrics.grad_norm, norm, rtol=1e-5)
    assert small_metrics.tokens == batch.weights.sum()
    first_moment = small.optimizer[1][0].mu  # (1 - b1) x the gradient, clipped to norm 1
    assert_near(first_moment, jax.tree.map(lambda g: 0.1 * g * min(1.0, 1.0 / norm), gradient), 1e-5)


@pytest.fixture(scope="module")
def single_device() -> tuple[list[Any], list[Any]]:
    return run(built(ONE), [packed(16, 32, seed) for seed in range(20)])


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_sharded_is_single_device(shape: tuple[int, int, int], single_device: tuple[list[Any], list[Any]]) -> None:
    program = built(MeshShape(*shape))
    gate = program.state.params.blocks.gate.value
    assert gate.sharding.shard_shape(gate.shape) == (2, 32 // shape[1], 64 // shape[2])
    states, metrics = run(program, [packed(16, 32, seed) for seed in range(20)])
    losses, expected = ([float(m.loss) for m in told] for told in (metrics, single_device[1]))
    assert len(losses) == 20
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    start, end = jax.tree.leaves(states[0]), jax.tree.leaves(single_device[0][0])
    assert [x.tobytes() for x in start] == [x.tobytes() for x in end], "initial state differs from one device's"
    assert_near(states[-1], single_device[0][-1], 1e-4)


def test_sharded_with_accumulation_and_an_odd_width() -> None:
    """Embed 36 does not divide by fsdp 8, so weights are split along other dimensions; 2 rows each in 2 parts."""
    odd = Model(layers=2, embed=36, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=VOCAB, tied=False)
    batches = [packed(16, 32, seed) for seed in range(3)]
    _, expected = run(built(ONE, model=odd), batches)
    program = built(MeshShape(1, 8, 1), model=odd, micro_batch=1)
    gate = program.state.params.blocks.gate.value
    assert gate.sharding.shard_shape(gate.shape) == (2, 36, 8)
    _, metrics = run(program, batches)
    np.testing.assert_allclose([m.loss for m in metrics], [m.loss for m in expected], rtol=1e-5)


@pytest.mark.parametrize(
    "remat",
    [
        Remat(policy="full"),
        Remat(policy="dots"),
        Remat(policy="named", keep=("layer_in", "query", "key", "value", "attention_out")),
        Remat(policy="named", keep=("mlp_gate", "mlp_up")),
    ],
    ids=lambda r: "-".join((r.policy, *r.keep[:1])),
)
def test_remat_changes_nothing(remat: Remat, without_remat: tuple[jax.Array, Any]) -> None:
    value, gradient = loss_and_gradient(remat)
    np.testing.assert_allclose(value, without_remat[0], rtol=1e-6)
    assert_near(gradient, without_remat[1], 1e-5)


def objective(remat: Remat) -> Any:
    model, batch = Decoder(TINY), jax.tree.map(jnp.asarray, packed(2, 20))
    return lambda params: NextToken(chunk=8)(model, params, batch, Compute(remat=remat)).loss


def loss_and_gradient(remat: Remat) -> tuple[jax.Array, Any]:
    return jax.jit(jax.value_and_grad(objective(remat)))(params_of(Decoder(TINY)))


@pytest.fixture(scope="module")
def without_remat() -> tuple[jax.Array, Any]:
    return loss_and_gradient(Remat(policy="none"))


def test_remat_policies_keep_what_they_say() -> None:
    """What the scan over layers carries to the backward pass, counted in floats, of one policy against another."""

    def saved(remat: Remat) -> int:
        jaxpr = jax.make_jaxpr(jax.grad(objective(remat)))(params_of(Decoder(TINY)))
        scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == TINY.layers]
        stacked = [v.aval for v in scans[0].outvars if v.aval.shape[:1] == (TINY.layers,)]  # the rest is carried
        return sum(aval.size for aval in stacked)

    B, S, c = 2, 20, TINY
    layer_in, queries, gate = (
        c.layers * B * S * c.embed,
        c.layers * B * S * c.heads * c.head_dim,
        c.layers * B * S * c.mlp,
    )
    full = saved(Remat(policy="full"))
    assert layer_in <= full < layer_in * 1.2
    more = saved(Remat(policy="named", keep=("query", "mlp_gate")))
    assert more - full == queries + gate
    assert saved(Remat(policy="none")) > saved(Remat(policy="dots")) > more


@pytest.mark.aot
def test_offloaded_residuals_go_to_the_host() -> None:
    """Offloading needs a device with a host: lowered for one TPU, whose memory spaces the program then names."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    shape = MeshShape(1, 4, 1)
    texts = []
    for offload in ((), ("layer_in", "mlp_gate")):
        job = Job(
            model=Model(layers=2, embed=256, heads=2, head_dim=128, mlp=512, vocab=VOCAB),
            data="unread",
            sequence=128,
            batch=4,
            steps=1,
            remat=Remat(policy="named", offload=offload),
        )
        program = build(ResolvedJob(job), make_mesh(shape, devices), derive(job, shape, None))
        texts.append(program.trace().lower().as_text())
    assert "pinned_host" not in texts[0]
    assert texts[1].count('"pinned_host"') >= 2


def test_average_is_a_plain_recomputation() -> None:
    states, _ = run(built(ONE, optimizer=Optimizer(lr=3e-3, ema=0.9)), [packed(16, 32, seed) for seed in range(4)])
    expected = jax.tree.map(lambda x: x.astype(np.float64), states[0].params)
    for state in states:
        expected = jax.tree.map(lambda a, p: 0.9 * a + (1 - 0.9) * p, expected, state.params)
    assert_near(states[-1].average, expected, 1e-6)
    moved = np.linalg.norm(states[-1].average.embed - states[0].params.embed)
    assert 0 < moved < np.linalg.norm(states[-1].params.embed - states[0].params.embed)
