from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_shapes import shapes_of

from forerun.nn import spec
from forerun.nn.spec import Fill, LogUniform, Normal, ParamSpec


def tree() -> dict[str, object]:
    return {
        "matrix": ParamSpec((4, 6), "EF", Normal(0.5)),
        "inner": {"bias": ParamSpec((6,), "F", Fill(0.25), decay=False), "absent": None},
        "fixed": ParamSpec((3, 3), "RR", Normal(1.0), trainable=False),
    }


def test_stack_puts_the_layers_first() -> None:
    stacked = spec.stack(tree(), 5)
    assert (stacked["matrix"].shape, stacked["matrix"].axes) == ((5, 4, 6), "LEF")
    assert (stacked["inner"]["bias"].shape, stacked["inner"]["bias"].decay) == ((5, 6), False)
    assert stacked["inner"]["absent"] is None
    assert not stacked["fixed"].trainable
    assert spec.count(stacked) == 5 * spec.count(tree()) == 5 * (24 + 6 + 9)


def test_a_letter_for_every_dimension() -> None:
    with pytest.raises(ValueError, match="2 dimensions but axes 'EFV'"):
        ParamSpec((4, 6), "EFV", Fill(0.0))


def test_abstract_is_what_initial_makes() -> None:
    specs = spec.cast(tree(), jnp.bfloat16)
    made, abstract = spec.initial(specs, jax.random.key(0)), shapes_of(specs)
    assert jax.tree.structure(made) == jax.tree.structure(abstract)
    for array, shape in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.dtype == jnp.bfloat16


def test_initial_values_are_those_that_were_declared() -> None:
    specs = {"wide": ParamSpec((200, 300), "EF", Normal(0.5)), "bias": ParamSpec((3,), "E", Fill(0.25))}
    made = spec.initial(specs, jax.random.key(1))
    assert abs(float(jnp.mean(made["wide"]))) < 0.01
    np.testing.assert_allclose(jnp.std(made["wide"]), 0.5, rtol=0.02)
    np.testing.assert_array_equal(made["bias"], np.full(3, 0.25))


def test_a_leaf_does_not_depend_on_its_neighbours() -> None:
    key = jax.random.key(7)
    all_of_it = spec.initial(tree(), key)
    fewer = spec.initial({"matrix": tree()["matrix"]}, key)
    more = spec.initial({"before": ParamSpec((2,), "E", Normal(1.0)), **tree()}, key)
    for other in (fewer, more):
        np.testing.assert_array_equal(other["matrix"], all_of_it["matrix"])
    renamed = spec.initial({"matrix2": tree()["matrix"]}, key)
    assert not np.array_equal(renamed["matrix2"], all_of_it["matrix"])
    assert not np.array_equal(spec.initial(tree(), jax.random.key(8))["matrix"], all_of_it["matrix"])


def test_layers_start_different() -> None:
    made = spec.initial(spec.stack({"w": ParamSpec((4,), "E", Normal(1.0))}, 3), jax.random.key(0))["w"]
    assert len({tuple(row) for row in made.tolist()}) == 3


def test_split_and_merge() -> None:
    mask = spec.map_specs(lambda s: s.trainable, tree())
    learning, frozen = spec.split(tree(), mask)
    assert (learning["fixed"], frozen["matrix"], frozen["inner"]["bias"]) == (None, None, None)
    assert learning["matrix"] is not None
    assert frozen["fixed"] is not None
    assert spec.count(learning) + spec.count(frozen) == spec.count(tree())
    assert spec.merge(learning, frozen) == tree()


def test_cast_leaves_a_parameter_that_keeps_its_dtype() -> None:
    rate = ParamSpec((2,), "H", LogUniform(0.5, 4.0), keeps_dtype=True)
    cast = spec.cast({"rate": rate, "bias": ParamSpec((2,), "H", Fill(0.0))}, jnp.bfloat16)
    assert (cast["rate"].dtype, cast["bias"].dtype) == (jnp.float32, jnp.bfloat16)
    drawn = np.exp(rate.init(jax.random.key(0), (1000,), jnp.float32))
    assert 0.5 <= drawn.min() < 0.6
    assert 3.9 < drawn.max() <= 4.0
