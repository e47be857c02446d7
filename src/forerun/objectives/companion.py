"""A model beside the one that learns: a teacher, or the model that a run began with. It rests, and is never saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from forerun.nn.spec import Tree, map_specs

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accompanied(Generic[T]):
    """The parameters of both. `T` is a tree of specs, shapes, shardings or arrays."""

    own: T
    companion: T


def at_rest(specs: Tree, dtype: object) -> Tree:
    """Specs of a companion: in `dtype`, without gradient, moments or a place in checkpoints."""
    return map_specs(lambda s: replace(s, dtype=dtype, trainable=False, saved=False), specs)
