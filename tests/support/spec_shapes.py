"""Shapes of parameter specs, for tests that need a tree without arrays."""

from __future__ import annotations

import jax

from forerun.nn.spec import Tree, map_specs


def shapes_of(specs: Tree) -> Tree:
    """Return the tree with a ShapeDtypeStruct for each spec."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
