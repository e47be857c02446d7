"""Weights whose products are computed with operands of 8 bits.

The state of a run has the usual weights. A train step computes their codes once, before its micro-batches, and puts
them beside the weights. Codes are gathered over devices and read again by each pass, with half of the traffic of
bfloat16.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.errors import UserError
from forerun.nn import sharding
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.lowrank import LowRank

T = TypeVar("T")
Kind = Literal["int8", "fp8"]
PRODUCT = "eight_bit_product"  # the name of results, for remat policies
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
_DTYPES = {"int8": jnp.int8, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
# A sum of this many products of two int8 codes is at most 2^24. Every partial sum is an integer, which float32
# represents exactly, in any order of the terms.
EXACT_TERMS = (1 << 24) // 127**2
INT32_TERMS = (2**31 - 1) // 127**2  # terms that an int32 sum can have without overflow
_BYTES_OF_CODES, _BYTES_OF_GRADIENT = 3, 5  # that rounding reads twice and writes, for each element
_SEEDS = (0x3C6EF372, 0xDAA66D2B)
_SMALLEST = 1e-30  # lower bound for the largest magnitude, so that zeros have a positive scale


@dataclass(frozen=True)
class Numerics:
    """How products of 8 bits are computed."""

    kind: Kind
    floats: bool = False  # multiply the codes as float32, with the same sums: CPUs multiply 8-bit operands slowly

    @property
    def values(self) -> str:
        """The format of activations and weights."""
        return "int8" if self.kind == "int8" else "e4m3"

    @property
    def gradients(self) -> str:
        """The format of gradients."""
        return "int8" if self.kind == "int8" else "e5m2"


@dataclass(frozen=True)
class Letters:
    """The dimensions of a product by their letters."""

    lead: str
    ins: str
    outs: str

    @classmethod
    def of(cls, equation: str) -> Letters:
        sides, result = equation.split("->")
        given, axes = sides.split(",")
        lead = "".join(letter for letter in given if letter not in axes)
        ins = "".join(letter for letter in axes if letter in given)
        outs = axes[len(ins) :]
        if given != lead + ins or axes != ins + outs or result != lead + outs:
            raise UserError(
                "E-METHOD-126",
                f"precision.matmul: the equation {equation} has no product of 8 bits",
                why="the inputs of a matrix must be the last dimensions of x and the first ones of the weight",
                fix="write the equation as in contract('BSE,EHD->BSHD', x, weight), or remove precision.matmul",
            )
        return cls(lead, ins, outs)

    @property
    def weight(self) -> str:
        return self.ins + self.outs


def codes_and_scale(
    values: jax.Array, dims: tuple[int, ...], form: str, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return codes and float32 scales of an array. `dims` are the dimensions that one scale covers, with size 1 there.

    Values that are not finite have a scale that is not finite, so that a diverged run is seen as such.

    Args:
        values: The array.
        dims: The dimensions that one scale covers.
        form: int8, e4m3 or e5m2.
        noise: Numbers in [0, 1) that decide how int8 codes are rounded, or None to round to the nearest code.
    """
    wide = values.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=dims, keepdims=True), _SMALLEST)
    unit = wide * (LARGEST[form] / largest)
    if form == "int8":
        unit = jnp.round(unit) if noise is None else jnp.floor(unit + noise)
    unit = jnp.clip(unit, -LARGEST[form], LARGEST[form])
    return unit.astype(_DTYPES[form]), largest / LARGEST[form]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightCodes(Generic[T]):
    """The codes of a weight [..., inputs, outputs], for the forward pass and for the gradient of `x`."""

    forward: T
    forward_scales: T  # [..., outputs]
    backward: T
    backward_scales: T  # [..., inputs]


def weight_codes(matrix: jax.Array, inputs: int, how: Numerics, lead: int = 0) -> WeightCodes[jax.Array]:
    """Return the codes of a matrix. `lead` is 1 for the stacked matrices of layers."""
    ins, outs = tuple(range(lead, lead + inputs)), tuple(range(lead + inputs, matrix.ndim))
    forward, columns = codes_and_scale(matrix, ins, how.values)
    backward, rows = codes_and_scale(matrix, outs, how.values)
    return WeightCodes(forward, jnp.squeeze(columns, ins), backward, jnp.squeeze(rows, outs))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(
    equation: str,
    how: Numerics,
    x: jax.Array,
    matrix: jax.Array,
    codes: WeightCodes[jax.Array],
    seed: jax.Array | None,
) -> jax.Array:
    """Return `einsum(equation, x, matrix)` by a product of 8 bits, in the dtype of `x`.

    Args:
        equation: See the module's docstring.
        how: The format of the operands.
        x: The activations.
        matrix: The weight. Only its gradient is used, which is that of its codes (straight-through estimator).
        codes: The codes of the weight, split over devices as the weight is.
        seed: uint32 [], from which the rounding of gradients follows, or None to round them to the nearest code.
    """
    return _forward(equation, how, x, matrix, codes, seed)[0]


def _forward(
    equation: str,
    how: Numerics,
    x: jax.Array,
    matrix: jax.Array,
    codes: WeightCodes[jax.Array],
    seed: jax.Array | None,
) -> tuple[jax.Array, Any]:
    letters = Letters.of(equation)
    lead, ins, outs = len(letters.lead), len(letters.ins), len(letters.outs)
    own, rows = codes_and_scale(x, tuple(range(lead, x.ndim)), how.values)
    used = sharding.as_used(codes.forward, letters.weight)
    sums = _dot(own, used, (_last(own, ins), _first(ins)), how)
    y = sums * rows.reshape(*x.shape[:lead], *(1,) * outs) * codes.forward_scales
    like = jnp.zeros((0,), matrix.dtype)
    return y.astype(x.dtype), (own, rows, codes, seed, like)


def _backward(equation: str, how: Numerics, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    own, rows, codes, seed, like = residuals
    letters = Letters.of(equation)
    lead, ins, outs = len(letters.lead), len(letters.ins), len(letters.outs)

    # ---- The gradient of x ----
    free = tuple(range(lead, gradient.ndim))
    error, error_rows = codes_and_scale(gradient, free, how.gradients, _noise(gradient, lead, seed, 0))
    used = sharding.as_used(codes.backward, letters.weight)
    sums = _dot(error, used, (_last(error, outs), _last(used, outs)), how)
    dx = sums * error_rows.reshape(*gradient.shape[:lead], *(1,) * ins) * codes.backward_scales

    # ---- The gradient of the weight ----
    # Tokens are split over devices. Each device has its own scales: those of all tokens would have to be exchanged
    # before a code is known, and int32 sums of all devices would be twice as large as the bfloat16 gradient.
    groups = _Groups.of(letters.lead, gradient.shape)
    inputs, outputs = math.prod(used.shape[:ins]), math.prod(used.shape[ins:])
    kept = tuple(groups.sizes[dim] for dim in groups.kept)
    if _BYTES_OF_CODES * inputs <= _BYTES_OF_GRADIENT * outputs:
        wide = own.astype(jnp.float32) * (rows * error_rows.reshape(rows.shape))
        left, scales = codes_and_scale(
            groups.apart(wide), groups.summed, how.values, groups.apart(_noise(wide, lead, seed, 1))
        )
        right = groups.apart(error)
        scales = scales.reshape(*kept, *used.shape[:ins], *(1,) * outs)
    else:
        wide = gradient.astype(jnp.float32) * rows.reshape(error_rows.shape)
        right, scales = codes_and_scale(
            groups.apart(wide), groups.summed, how.gradients, groups.apart(_noise(wide, lead, seed, 1))
        )
        left = groups.apart(own)
        scales = scales.reshape(*kept, *(1,) * ins, *used.shape[ins:])
    sums = _dot(left, right, (groups.summed, groups.summed), how, (groups.kept, groups.kept))
    parts = (sums * scales).astype(gradient.dtype)
    if kept:  # without `jnp.sum`, which would sum in float32: twice the traffic between devices
        parts = jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, tuple(range(len(kept))))
    dw = sharding.as_stored(parts, letters.weight).astype(like.dtype)
    return dx.astype(gradient.dtype), dw, None, None


product.defvjp(_forward, _backward)


def _noise(values: jax.Array, lead: int, seed: jax.Array | None, number: int) -> jax.Array | None:
    """Return the rounding noise of an operand of the backward pass, or None without a seed."""
    return None if seed is None else rounding_noise(values.shape, lead, seed ^ jnp.uint32(_SEEDS[number]))


def rounding_noise(shape: tuple[int, ...], lead: int, seed: jax.Array) -> jax.Array:
    """Return numbers in [0, 1) for stochastic rounding, which depend on the seed and the place in the array.

    Each is the fractional part of the sum of a number of its row and a number of its column. Numbers at two different
    places are independent, as the variance of a sum requires, and only one addition per element is needed. They do
    not depend on how the array is split over devices.
    """
    row = _hashed(shape[:lead], seed)
    column = _hashed(shape[lead:], seed ^ jnp.uint32(0x9E3779B9))
    total = row.reshape(*shape[:lead], *(1,) * (len(shape) - lead)) + column
    return jnp.where(total >= 1.0, total - 1.0, total)


def _hashed(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return a multiple of 2^-16 in [0, 1) for each place in an array, by the finalizer of MurmurHash3, twice."""
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % (1 << 32))
        stride *= shape[dim]
    bits = _mixed(_mixed(place) ^ _mixed(seed))
    return (bits >> jnp.uint32(16)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-16)


def _mixed(bits: jax.Array) -> jax.Array:
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> jnp.uint32(16))


@dataclass(frozen=True)
class _Groups:
    """Leading dimensions of an array, with the dimensions that are split over devices divided in two."""

    sizes: tuple[int, ...]  # the leading dimensions after the division
    kept: tuple[int, ...]  # the dimensions with one entry per group of devices
    summed: tuple[int, ...]
    axes: tuple[Any, ...]  # the mesh axes of each dimension

    @classmethod
    def of(cls, lead: str, shape: tuple[int, ...]) -> _Groups:
        mesh = sharding.ambient_sizes()
        sizes: list[int] = []
        kept, summed = [], []
        axes: list[tuple[str, ...] | None] = []
        for letter, size in zip(lead, shape, strict=False):
            names = tuple(axis for axis, letters in sharding.TOKENS if letter in letters and mesh.get(axis, 1) > 1)
            ways = math.prod(mesh[axis] for axis in names)
            if ways > 1 and size % ways == 0:
                kept.append(len(sizes))
                sizes.append(ways)
                axes.append(names)
                size //= ways
            summed.append(len(sizes))
            sizes.append(size)
            axes.append(None)
        return cls(tuple(sizes), tuple(kept), tuple(summed), tuple(axes))

    def apart(self, x: Any) -> Any:
        """Return the array, or None, with its leading dimensions divided."""
        if x is None or not self.kept:
            return x
        rest = x.shape[len(self.summed) :]
        free = (PartitionSpec.UNCONSTRAINED,) * len(rest)
        return jax.lax.with_sharding_constraint(x.reshape(*self.sizes, *rest), PartitionSpec(*self.axes, *free))


def _first(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _last(x: jax.Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _dot(x: jax.Array, y: jax.Array, summed: Pair, how: Numerics, batch: Pair = ((), ())) -> jax.Array:
    """Return the product of two arrays of codes in float32: exact sums for int8 before they are rounded to float32."""
    if how.kind == "int8" and not how.floats:
        sums = jax.lax.dot_general(x, y, (summed, batch), preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32)
    if not how.floats:
        return jax.lax.dot_general(x, y, (summed, batch), preferred_element_type=jnp.float32)
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    terms = math.prod(x.shape[dim] for dim in summed[0])
    if how.kind == "fp8" or terms <= EXACT_TERMS:
        return jax.lax.dot_general(x, y, (summed, batch), precision=jax.lax.Precision.HIGHEST)
    return _chunked(x, y, summed, batch, terms)


def _chunked(x: jax.Array, y: jax.Array, summed: Pair, batch: Pair, terms: int) -> jax.Array:
    """Return the product of integers in float32, with exact sums: of few terms in float32, and of these in int32."""
    count = -(-terms // EXACT_TERMS)

    def parts(z: jax.Array, summed: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array:
        free = tuple(dim for dim in range(z.ndim) if dim not in (*summed, *batch))
        z = z.transpose(*batch, *summed, *free)
        z = z.reshape(*z.shape[: len(batch)], terms, *z.shape[len(batch) + len(summed) :])
        more = [(0, 0)] * z.ndim
        more[len(batch)] = (0, -terms % count)
        z = jnp.pad(z, more)
        return z.reshape(*z.shape[: len(batch)], count, -1, *z.shape[len(batch) + 1 :])

    both = _first(len(batch[0]) + 1)
    inner = (len(batch[0]) + 1,)
    sums = jax.lax.dot_general(
        parts(x, summed[0], batch[0]),
        parts(y, summed[1], batch[1]),
        ((inner, inner), (both, both)),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.sum(sums.astype(jnp.int32), axis=len(batch[0])).astype(jnp.float32)


# ---- Weights whose products are computed with operands of 8 bits ----
# The state of a run has the usual weights. A train step computes their codes once, before its micro-batches, and puts
# them beside the weights. Codes are gathered over devices and read again by each pass, with half of the traffic of
# bfloat16.


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
