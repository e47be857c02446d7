"""Equilibrium layer: a state that a function maps to itself, with the exact gradient at that state.

The forward pass iterates `state + damping * (function(state) - state)`. The backward pass does not differentiate the
iterations. By the implicit function theorem, the gradient is one vector-Jacobian product of the function at the
solution, applied to the solution of `u = g + J^T u` (Bai, Kolter and Koltun, Deep Equilibrium Models, 2019). The memory
is therefore that of one iteration.

Both loops have a fixed number of iterations, and an equilibrium that has converged no longer changes. The number of
operations is then known at compile time, as `forerun plan` needs it, and no result depends on the other tokens of the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Function = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class EquilibriumSolver:
    """Settings of the iterations.

    Attributes:
        iterations: The number of iterations of the forward pass.
        adjoint_iterations: The number of iterations of the backward pass, or None for as many as in the forward pass.
        tolerance: The relative residual below which a state no longer changes.
        damping: The share of the new value in each iteration, above 0 and up to 1. A smaller share converges for more
            functions, but more slowly.
    """

    iterations: int = 24
    adjoint_iterations: int | None = None
    tolerance: float = 1e-3
    damping: float = 1.0

    def __post_init__(self) -> None:
        if self.iterations < 1 or (self.adjoint_iterations is not None and self.adjoint_iterations < 1):
            raise TypeError(f"an equilibrium needs at least one iteration, not {self.iterations}")
        if not 0 < self.damping <= 1:
            raise TypeError(f"damping {self.damping} is not above 0 and at most 1")
        if self.tolerance < 0:
            raise TypeError(f"tolerance {self.tolerance} is negative")


class Equilibrium(NamedTuple):
    """The result of `equilibrium`."""

    state: jax.Array
    residual: (
        jax.Array
    )  # |function(state) - state| / |function(state)| of each equilibrium, float32, without a gradient


def equilibrium(
    function: Function, start: jax.Array, solver: EquilibriumSolver, axes: tuple[int, ...] = (-1,)
) -> Equilibrium:
    """Return the state that `function` maps to itself, and how far the function still moves it.

    Arrays of floats that `function` uses from outside get their gradient. `start` has none, because the equilibrium
    does not depend on it.

    Args:
        function: Maps a state to a state of the same shape. It must be a contraction near the equilibrium.
        start: The first state. Use float32: the residual of bfloat16 does not fall below about 0.004.
        solver: The number of iterations, the tolerance and the damping.
        axes: The dimensions of one equilibrium. Each index of the other dimensions, such as a token, has its own.
    """
    converted, captured = jax.closure_convert(function, start)
    state, residual = _solve(converted, solver, axes, tuple(captured), start)
    return Equilibrium(state, residual)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _solve(
    function: Callable[..., jax.Array],
    solver: EquilibriumSolver,
    axes: tuple[int, ...],
    captured: tuple[Any, ...],
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def step(state: jax.Array) -> jax.Array:
        return function(state, *captured)

    state = _iterated(step, start, solver.iterations, solver, axes)
    return state, jnp.squeeze(_residual(step(state), state, axes), axes)


def _forward(
    function: Callable[..., jax.Array],
    solver: EquilibriumSolver,
    axes: tuple[int, ...],
    captured: tuple[Any, ...],
    start: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[tuple[Any, ...], jax.Array]]:
    state, residual = _solve(function, solver, axes, captured, start)
    return (state, residual), (captured, state)


def _backward(
    function: Callable[..., jax.Array],
    solver: EquilibriumSolver,
    axes: tuple[int, ...],
    saved: tuple[tuple[Any, ...], jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[tuple[Any, ...], jax.Array]:
    """Return the gradients of the captured arrays and of the start.

    The residual has no gradient: the derivative of a norm at 0 is not finite, and a converged state has residual 0.
    """
    captured, state = saved
    gradient, _ = cotangents
    _, by_state = jax.vjp(lambda state: function(state, *captured), state)

    def step(adjoint: jax.Array) -> jax.Array:
        return gradient + by_state(adjoint)[0]

    adjoint = _iterated(step, gradient, solver.adjoint_iterations or solver.iterations, solver, axes)
    _, by_captured = jax.vjp(lambda captured: function(state, *captured), captured)
    return by_captured(adjoint)[0], jnp.zeros_like(state)


_solve.defvjp(_forward, _backward)


def _iterated(
    step: Function, start: jax.Array, iterations: int, solver: EquilibriumSolver, axes: tuple[int, ...]
) -> jax.Array:
    """Return the state after the damped iterations. A state below the tolerance keeps its value."""

    def once(state: jax.Array, _: None) -> tuple[jax.Array, None]:
        new = step(state)
        # "Not converged" and not "above the tolerance": a residual of NaN must reach the loss, where the guard sees it.
        moves = ~(_residual(new, state, axes) <= solver.tolerance)
        return jnp.where(moves, state + jnp.asarray(solver.damping, state.dtype) * (new - state), state), None

    state, _ = jax.lax.scan(once, start, None, length=iterations)
    return state


def _residual(new: jax.Array, state: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the relative change of each equilibrium in float32, with size 1 along `axes`."""

    def size(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))

    return size(new.astype(jnp.float32) - state.astype(jnp.float32)) / (size(new) + jnp.finfo(jnp.float32).tiny)
