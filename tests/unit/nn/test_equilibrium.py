"""The equilibrium layer against the exact solution of a linear system, in NumPy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn.equilibrium import EquilibriumSolver, equilibrium

ROWS, SIZE = 3, 5


def system() -> tuple[Any, Any, Any]:
    """A matrix with spectral norm 0.6, inputs of three rows, and weights of the loss."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(SIZE, SIZE))
    return 0.6 * matrix / np.linalg.norm(matrix, 2), random.normal(size=(ROWS, SIZE)), random.normal(size=(ROWS, SIZE))


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_state_and_gradients_are_those_of_the_exact_solution(damping: float) -> None:
    matrix, inputs, weights = system()
    solver = EquilibriumSolver(80, tolerance=1e-7, damping=damping)

    @jax.jit
    def scored(matrix: jax.Array, inputs: jax.Array, start: jax.Array) -> tuple[jax.Array, Any]:
        found = equilibrium(lambda z: z @ matrix.T + inputs, start, solver)
        return jnp.sum(found.state * jnp.asarray(weights, jnp.float32)), found

    arguments = [jnp.asarray(x, jnp.float32) for x in (matrix, inputs, np.ones_like(inputs))]
    (_, found), gradients = jax.value_and_grad(scored, argnums=(0, 1, 2), has_aux=True)(*arguments)
    inverse = np.linalg.inv(np.eye(SIZE) - matrix)
    state, adjoint = inputs @ inverse.T, weights @ inverse
    np.testing.assert_allclose(found.state, state, atol=1e-5)
    np.testing.assert_allclose(gradients[0], adjoint.T @ state, atol=1e-4)
    np.testing.assert_allclose(gradients[1], adjoint, atol=1e-5)
    np.testing.assert_array_equal(gradients[2], 0)
    assert found.residual.shape == (ROWS,)
    assert (found.residual < 1e-6).all()


def test_too_few_iterations_are_visible_in_the_residual() -> None:
    matrix, inputs, _ = (jnp.asarray(x, jnp.float32) for x in system())
    start = jnp.zeros_like(inputs)
    few, many = (
        equilibrium(lambda z: z @ matrix.T + inputs, start, EquilibriumSolver(n, tolerance=0.0)) for n in (2, 40)
    )
    expected = np.linalg.norm(few.state @ matrix.T + inputs - few.state, axis=-1)
    expected /= np.linalg.norm(few.state @ matrix.T + inputs, axis=-1)
    np.testing.assert_allclose(few.residual, expected, rtol=1e-4)
    assert (many.residual < 0.01 * few.residual).all()


def test_a_converged_row_does_not_depend_on_the_others() -> None:
    """A row that starts at its equilibrium is returned unchanged, whatever the other rows do."""
    matrix, inputs, _ = (jnp.asarray(x, jnp.float32) for x in system())
    solver = EquilibriumSolver(60, tolerance=1e-3)

    def solved(rows: slice, start: jax.Array) -> jax.Array:
        own = inputs[rows]
        return equilibrium(lambda z: z @ matrix.T + own, start, solver).state

    state = solved(slice(None), jnp.zeros_like(inputs))
    mixed = solved(slice(None), state.at[1:].set(100.0))
    np.testing.assert_array_equal(mixed[0], state[0])
    np.testing.assert_allclose(solved(slice(0, 1), jnp.zeros_like(inputs[:1]))[0], state[0], rtol=1e-6)


def test_a_converged_start_and_a_zero_gradient_have_finite_gradients() -> None:
    """The residual is 0 there, and the derivative of a norm at 0 is not finite."""

    def scored(scale: jax.Array) -> jax.Array:
        found = equilibrium(lambda z: scale * z, jnp.zeros((2, SIZE)), EquilibriumSolver(4))
        return jnp.sum(found.state) + jnp.sum(found.residual)

    value, gradient = jax.value_and_grad(scored)(jnp.float32(0.5))
    assert float(value) == 0.0
    assert float(gradient) == 0.0


def test_a_value_that_is_not_finite_reaches_the_state() -> None:
    found = equilibrium(lambda z: z * jnp.nan, jnp.ones((1, SIZE)), EquilibriumSolver(3))
    assert np.isnan(found.state).all()
    assert np.isnan(found.residual).all()


def test_memory_and_trip_counts_do_not_depend_on_the_data() -> None:
    """The backward pass keeps the state of one iteration, and every loop has a length that the compiler knows."""

    def scored(matrix: jax.Array, iterations: int) -> jax.Array:
        found = equilibrium(lambda z: jnp.tanh(z @ matrix), jnp.ones((2, SIZE)), EquilibriumSolver(iterations))
        return jnp.sum(found.state)

    matrix = jnp.eye(SIZE)
    kept = [
        sum(
            x.size
            for x in jax.tree.leaves(jax.eval_shape(lambda m, n=n: jax.vjp(lambda m: scored(m, n), m)[1], matrix))
        )
        for n in (2, 50)
    ]
    assert kept[0] == kept[1]
    text = str(jax.make_jaxpr(jax.grad(lambda m: scored(m, 7)))(matrix))
    assert "while" not in text
    assert text.count("length=7") == 2


def test_layers_in_a_scan_with_remat_have_the_gradient_of_layers_one_after_the_other() -> None:
    matrix, inputs, weights = (jnp.asarray(x, jnp.float32) for x in system())
    matrices = jnp.stack([matrix, 0.5 * matrix])
    solver = EquilibriumSolver(60, tolerance=1e-7)

    def layer(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return equilibrium(lambda z: jnp.tanh(z @ matrix + x), x, solver).state

    def looped(matrices: jax.Array, *, scan: bool) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(lambda x, m: (jax.checkpoint(layer)(x, m), None), inputs, matrices)
        else:
            x = layer(layer(inputs, matrices[0]), matrices[1])
        return jnp.sum(x * weights)

    one, other = (jax.grad(lambda m, scan=scan: looped(m, scan=scan))(matrices) for scan in (True, False))
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"adjoint_iterations": 0}, {"damping": 0.0}, {"tolerance": -1.0}])
def test_invalid_settings_are_type_errors_that_a_job_reports(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        EquilibriumSolver(**wrong)
