"""Weights whose products are computed with operands of 8 bits.

The state of a run has the usual weights. A train step computes their codes once, before its micro-batches, and puts
them beside the weights. Codes are gathered over devices and read again by each pass, with half of the traffic of
bfloat16.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from forerun.nn import sharding
from forerun.nn.eight_bit_product import PRODUCT, Numerics, WeightCodes, product, weight_codes
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.lowrank import LowRank

T = TypeVar("T")
COMPANION = ".companion"  # the path of a frozen model beside the trained one, such as a teacher
UNCHANGED = "XV"  # letters of matrices that stay: routers and experts, and tables of the vocabulary
Codes = dict[str, WeightCodes[jax.Array]]  # by the path of the weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EightBit(Generic[T]):
    """A dense weight with its codes. It exists only inside of a train step."""

    base: Dense[T]
    codes: WeightCodes[T]
    seed: T | None = None
    how: Numerics = field(metadata={"static": True})

    def matrix(self: EightBit[jax.Array], axes: str, dtype: Any) -> jax.Array:
        return self.base.matrix(axes, dtype)

    def contract(self: EightBit[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        made = product(equation, self.how, x, self.base.value, self.codes, self.seed)
        return checkpoint_name(made, PRODUCT)


@dataclass(frozen=True)
class Matrix:
    """The letters of stacked matrices, and the number of their input dimensions."""

    axes: str
    inputs: int


@dataclass(frozen=True)
class EightBitWeights:
    """The weights of a program whose products are computed with 8 bits."""

    how: Numerics
    seed: int
    matrices: Mapping[str, Matrix]  # by the path of the weight

    def codes(self, params: Tree) -> Codes:
        """Return the codes and scales of the chosen weights. `params` are those of the trained model."""
        found: Codes = {}
        for path, weight in _weights(params):
            if path in self.matrices:
                axes, inputs = self.matrices[path].axes, self.matrices[path].inputs
                made = weight_codes(jax.lax.stop_gradient(_dense(weight).value), inputs, self.how, lead=1)
                # Without these constraints, the partitioner may gather the weights and compute their codes after that.
                forward, backward = (sharding.as_stored(codes, axes) for codes in (made.forward, made.backward))
                found[path] = replace(made, forward=forward, backward=backward)
        return found

    def with_codes(self, params: Tree, codes: Codes, key: jax.Array) -> Tree:
        """Return the parameters with codes beside the chosen weights, and a seed for each layer."""

        def leaf(path: Any, weight: Any) -> Any:
            name = jax.tree_util.keystr(path)
            if name not in codes:
                return weight
            seed = None
            if self.how.kind == "int8":
                layers = codes[name].forward.shape[:1]
                seed = jax.random.bits(jax.random.fold_in(key, zlib.crc32(name.encode())), layers)
            made = EightBit(base=_dense(weight), codes=codes[name], seed=seed, how=self.how)
            return replace(weight, base=made) if isinstance(weight, LowRank) else made

        return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_weight)


def chosen_matrices(specs: Tree) -> dict[str, Matrix]:
    """Return the matrices whose products may have 8 bits, by their paths.

    These are the matrices of layers that project activations. A matrix with one output per head, such as the decay of a
    gated delta rule, is small and feeds an exponential.
    """
    found = {}
    for path, weight in _weights(specs):
        base = _dense(weight)
        spec = base.value if isinstance(base, Dense) else None
        if path.startswith(COMPANION) or not isinstance(spec, ParamSpec) or not spec.axes.startswith("L"):
            continue
        axes = spec.axes[1:]
        if spec.inputs and not set(axes) & set(UNCHANGED) and axes[spec.inputs :] != "H":
            found[path] = Matrix(spec.axes, spec.inputs)
    return found


def _weights(tree: Tree) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if is_weight(leaf)]


def _dense(weight: Any) -> Any:
    return weight.base if isinstance(weight, LowRank) else weight
