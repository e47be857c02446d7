"""A frozen model beside the trained one: a teacher, or the model at the start of the run. It is never saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from forerun.nn.spec import Tree, map_specs

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithCompanion(Generic[T]):
    """The parameters of the trained model and of its companion. `T` is a tree of specs, shapes, shardings or arrays."""

    own: T
    companion: T


def at_rest(specs: Tree, dtype: object) -> Tree:
    """Return the specs of a companion in `dtype`, without gradients and optimizer moments, and not saved."""
    return map_specs(lambda s: replace(s, dtype=dtype, trainable=False, saved=False), specs)
