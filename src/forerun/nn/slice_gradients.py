"""Gradients of layers that are summed over the slices inside the backward pass.

The sum of a layer's gradient does not depend on the layers before it. The TPU compiler moves it into the next iteration
of the loop over the layers, so the network between slices works while the core computes the next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

Sum = Callable[[jax.Array], jax.Array]


@dataclass
class LayerSums:
    """How the gradients of layers are summed while a function is traced.

    Attributes:
      over: returns the sum of an array over the slices.
      used: whether the model has passed its layers to `with_summed_gradient`.
    """

    over: Sum
    used: bool = False


_CURRENT: ContextVar[LayerSums | None] = ContextVar("layer_sums", default=None)


@contextmanager
def summing_layers(over: Sum) -> Iterator[LayerSums]:
    """Sum the gradients of layers by `over` in all functions that are traced inside the block."""
    sums = LayerSums(over)
    token = _CURRENT.set(sums)
    try:
        yield sums
    finally:
        _CURRENT.reset(token)


def with_summed_gradient(weights: Any) -> Any:
    """Return the weights of one layer. Inside `summing_layers`, their gradient is summed over the slices.

    A model calls it at the start of each of its layers, with all weights of the layer and nothing else.
    """
    sums = _CURRENT.get()
    if sums is None:
        return weights
    sums.used = True
    return _summed(sums.over, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(over: Sum, weights: Any) -> Any:
    return weights


def _forward(over: Sum, weights: Any) -> tuple[Any, None]:
    return weights, None


def _backward(over: Sum, _: None, gradient: Any) -> tuple[Any]:
    return (jax.tree.map(over, gradient),)


_summed.defvjp(_forward, _backward)
