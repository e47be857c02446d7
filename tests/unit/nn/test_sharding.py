from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from forerun.nn import sharding
from forerun.nn.sharding import ACTIVATIONS, RESIDUALS, WEIGHTS_STORED, WEIGHTS_USED, partition

P = PartitionSpec
CASES = [
    # shape, letters, (data, fsdp, tp), rules, expected
    ((64, 8, 16), "EHD", (1, 1, 1), WEIGHTS_STORED, P(None, None, None)),
    ((64, 8, 16), "EHD", (1, 8, 1), WEIGHTS_STORED, P("fsdp", None, None)),
    ((64, 8, 16), "EHD", (2, 2, 2), WEIGHTS_STORED, P("fsdp", "tp", None)),
    ((64, 2, 16), "EKD", (1, 1, 8), WEIGHTS_STORED, P(None, None, None)),  # 2 kv heads stay whole under tp 8
    ((36, 8, 16), "EHD", (1, 8, 1), WEIGHTS_STORED, P(None, None, "fsdp")),  # 36 / 8: the next letter in EFVDHK
    ((36, 48), "EF", (1, 8, 1), WEIGHTS_STORED, P(None, "fsdp")),
    ((36, 48), "EF", (1, 8, 2), WEIGHTS_STORED, P(None, ("tp", "fsdp"))),  # 48 / 16
    ((36, 40), "EF", (1, 8, 2), WEIGHTS_STORED, P(None, "tp")),  # 40 / 16 is not whole: fsdp finds no place
    ((35, 33), "EF", (1, 8, 2), WEIGHTS_STORED, P(None, None)),
    ((128, 64), "VE", (2, 2, 2), WEIGHTS_STORED, P("tp", "fsdp")),
    ((129, 64), "VE", (2, 2, 2), WEIGHTS_STORED, P(None, "fsdp")),
    ((4, 64, 48), "LEF", (1, 4, 2), WEIGHTS_STORED, P(None, "fsdp", "tp")),  # layers are never split
    ((8, 8), "RR", (2, 2, 2), WEIGHTS_STORED, P(None, None)),  # letters of no rule
    ((128, 64), "VE", (2, 2, 2), WEIGHTS_USED, P("tp", None)),
    ((8, 32, 4, 16), "BSHD", (2, 2, 2), ACTIVATIONS, P(("data", "fsdp"), None, "tp", None)),
    ((2, 32, 4, 16), "BSHD", (2, 2, 2), ACTIVATIONS, P("data", None, "tp", None)),  # 2 rows are too few for 4
    ((8, 32, 64), "BSE", (2, 2, 2), RESIDUALS, P(("data", "fsdp"), "tp", None)),
    ((8, 33, 64), "BSE", (2, 2, 2), RESIDUALS, P(("data", "fsdp"), None, None)),
]


@pytest.mark.parametrize(("shape", "axes", "sizes", "rules", "expected"), CASES)
def test_partition(shape: tuple[int, ...], axes: str, sizes: tuple[int, ...], rules: object, expected: object) -> None:
    assert partition(shape, axes, dict(zip(sharding.AXES, sizes, strict=True)), rules) == expected


@pytest.mark.parametrize(
    ("shape", "axes", "sizes", "expected"),
    [
        ((8, 64, 48), "XEM", {"fsdp": 2, "expert": 4}, P(("expert", "fsdp"), None, None)),
        ((4, 64, 48), "XEM", {"fsdp": 2, "expert": 4}, P("expert", "fsdp", None)),
        ((4, 64, 48), "XEM", {"expert": 4, "tp": 2}, P("expert", None, "tp")),
        ((64, 48), "EF", {"fsdp": 2, "expert": 4}, P(("fsdp", "expert"), None)),  # as one fsdp of 8
        ((68, 48), "EF", {"fsdp": 2, "expert": 4}, P("fsdp", "expert")),
        ((64, 8), "EX", {"fsdp": 2, "expert": 4}, P(None, ("expert", "fsdp"))),  # a large router, as experts
    ],
)
def test_the_expert_axis_splits_experts_first_and_other_weights_as_fsdp_does(
    shape: tuple[int, ...], axes: str, sizes: dict[str, int], expected: object
) -> None:
    assert partition(shape, axes, sizes, WEIGHTS_STORED) == expected
    assert partition((16, 64), "BE", sizes, sharding.BATCH_RULES)[0] is not None


def test_no_axis_twice_and_every_part_whole() -> None:
    sizes = {"data": 2, "fsdp": 4, "expert": 2, "tp": 2}
    for shape in product((3, 8, 12, 64), repeat=3):
        for axes in ("EHD", "HDE", "EKD", "LEF", "LFE", "XEM", "BSE", "BSF", "BSV"):
            for rules in (WEIGHTS_STORED, WEIGHTS_USED, ACTIVATIONS, RESIDUALS):
                entries = [(e,) if isinstance(e, str) else e or () for e in partition(shape, axes, sizes, rules)]
                used = [axis for entry in entries for axis in entry]
                assert len(used) == len(set(used)), (shape, axes)
                for dim, entry in zip(shape, entries, strict=True):
                    assert dim % int(np.prod([sizes[axis] for axis in entry])) == 0, (shape, axes)


def mesh(*sizes: int) -> Mesh:
    grid = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(grid, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def test_without_a_mesh_nothing_happens() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    assert sharding.constrain(x, "BE") is x
    np.testing.assert_array_equal(sharding.gather(x, "EF"), x)
    assert sharding.by_hand(np.sum, arguments=(P("data"),), results=P()) is np.sum


def test_constrain_and_gather_lay_out_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 1)
    here = mesh(2, 2, 2)
    with jax.set_mesh(here):
        x = jax.jit(lambda x: sharding.constrain(x, "BSHD"))(jnp.ones((8, 4, 4, 2)))
        assert x.sharding.shard_shape(x.shape) == (2, 4, 2, 2)
        weight = jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding.stored(here, (8, 8), "EF"))
        assert weight.sharding.shard_shape((8, 8)) == (4, 4)
        used, gradient = jax.jit(
            lambda w: (sharding.gather(w, "EF"), jax.grad(lambda w: jnp.sum(sharding.gather(w, "EF") ** 3))(w))
        )(weight)
        assert used.sharding.shard_shape((8, 8)) == (8, 4)
        assert gradient.sharding.shard_shape((8, 8)) == (4, 4)
        np.testing.assert_allclose(gradient, 3 * np.arange(64.0).reshape(8, 8) ** 2, rtol=1e-6)


def test_by_hand_gives_each_device_its_part() -> None:
    def local(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert part.shape == (2, 4)
        return jax.lax.psum(jnp.sum(part, keepdims=True)[0], ("data", "fsdp")), part * 2

    rows = P(("data", "fsdp"), "tp")
    x = jnp.arange(64.0).reshape(8, 8)
    with jax.set_mesh(mesh(2, 2, 2)):
        totals, doubled = jax.jit(sharding.by_hand(local, arguments=(rows,), results=(P("tp"), rows)))(x)
    np.testing.assert_array_equal(totals, [np.sum(x[:, :4]), np.sum(x[:, 4:])])
    np.testing.assert_array_equal(doubled, 2 * np.asarray(x))


@pytest.mark.parametrize(
    ("shape", "axes", "parts"),
    [
        ((512, 256), "EF", (256, 128)),
        ((4, 512, 256), "LEF", (4, 256, 128)),
        ((64, 64), "EF", (64, 32)),  # too small for fsdp, tp splits the work itself
        ((90, 32, 32), "LEF", (90, 32, 16)),  # layers do not make a weight large
        ((512,), "E", (512,)),
    ],
)
def test_small_weights_rest_whole(shape: tuple[int, ...], axes: str, parts: tuple[int, ...]) -> None:
    assert sharding.stored(mesh(2, 2, 2), shape, axes).shard_shape(shape) == parts


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 1, 8)])
def test_lookup_is_indexing_and_its_gradient_a_count(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 1)
    here = mesh(*shape)
    table = np.random.default_rng(0).normal(size=(10, 16)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 10, (8, 4)).astype(np.int32)
    with jax.set_mesh(here):
        placed = jax.device_put(table, sharding.stored(here, table.shape, "VE"))
        rows = jax.jit(sharding.lookup)(placed, tokens)
        gradient = jax.jit(jax.grad(lambda t: jnp.sum(sharding.lookup(t, tokens))))(placed)
    np.testing.assert_array_equal(rows, table[tokens])
    counts = np.bincount(tokens.ravel(), minlength=10)
    np.testing.assert_array_equal(gradient, np.broadcast_to(counts[:, None], table.shape))
