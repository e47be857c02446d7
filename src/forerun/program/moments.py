"""Optimizers whose state is one object per parameter: Muon, Adafactor and AdamW with 8-bit moments.

Each object is a dataclass of arrays. `by_parameter` makes an Optax transformation of such rules, and `placed` gives
every array of an optimizer's state its sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.methods.optimizer_parameters import ParamLayout
from forerun.nn import sharding
from forerun.nn.spec import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdamMoments:
    """The two moments of AdamW."""

    mean: Any
    square: Any


class MomentRule(Protocol):
    """The state and the update of one parameter."""

    def init(self, param: jax.Array) -> Any:
        """Return the state at step 0."""

    def update(self, gradient: jax.Array, moments: Any, param: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
        """Return the direction to move against, before weight decay and learning rate, and the new state.

        `count` is the number of this step, starting at 1.
        """


class MomentState(NamedTuple):
    """The state of `by_parameter`."""

    count: Any  # int32: steps taken
    moments: Tree  # the tree of parameters, with an object of its rule in place of each parameter


def by_parameter(rule_of: Callable[[ParamLayout], MomentRule], layouts: Tree) -> optax.GradientTransformation:
    """Return the transformation that applies to each parameter the rule of its layout."""
    rules = jax.tree.map(rule_of, layouts)

    def init(params: Tree) -> MomentState:
        moments = jax.tree.map(lambda rule, param: rule.init(param), rules, params)
        return MomentState(jnp.zeros((), jnp.int32), moments)

    def update(gradients: Tree, state: MomentState, params: Tree) -> tuple[Tree, MomentState]:
        count = optax.safe_increment(state.count)
        leaves: list[jax.Array]
        tree: Any
        leaves, tree = jax.tree.flatten(gradients)
        parts = (tree.flatten_up_to(one) for one in (rules, state.moments, params))
        made = [
            rule.update(gradient, moments, param, count)
            for gradient, rule, moments, param in zip(leaves, *parts, strict=True)
        ]
        directions = [direction.astype(g.dtype) for (direction, _), g in zip(made, leaves, strict=True)]
        return tree.unflatten(directions), MomentState(count, tree.unflatten([moments for _, moments in made]))

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class AdamRule:
    """AdamW with moments in the dtype of the parameter, as `optax.scale_by_adam`."""

    b1: float
    b2: float
    eps: float

    def init(self, param: jax.Array) -> AdamMoments:
        return AdamMoments(jnp.zeros_like(param), jnp.zeros_like(param))

    def update(
        self, gradient: jax.Array, moments: AdamMoments, param: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, AdamMoments]:
        mean = (1 - self.b1) * gradient + self.b1 * moments.mean
        square = (1 - self.b2) * gradient**2 + self.b2 * moments.square
        return self.direction(mean, square, count), AdamMoments(mean.astype(param.dtype), square.astype(param.dtype))

    def direction(self, mean: jax.Array, square: jax.Array, count: jax.Array) -> jax.Array:
        """Return the direction for moments that are not corrected for their start at zero yet."""
        root = jnp.sqrt(square / (1 - self.b2**count).astype(square.dtype))
        return mean / (1 - self.b1**count).astype(mean.dtype) / (root + self.eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Factors:
    """Means of the squared gradient over the columns and over the rows of a matrix."""

    row: Any  # [layers, rows...]
    col: Any  # [layers, columns...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Square:
    """The mean squared gradient of a parameter that is not a matrix."""

    square: Any


@dataclass(frozen=True)
class AdafactorRule:
    """Adafactor (Shazeer and Stern, 2018) without momentum, with updates relative to the RMS of the parameter.

    Every layer's matrix has its own factors, its own clipping and its own RMS. The state is float32 also for bfloat16
    parameters: it changes by less than bfloat16 can represent, and it is small.
    """

    layout: ParamLayout
    decay_power: float = 0.8  # the decay at step t is 1 - t^-0.8
    floor: float = 1e-30  # added to squared gradients
    clip: float = 1.0  # limit of the RMS of an update
    smallest: float = 1e-3  # lower bound of the parameter's RMS, so that parameters at zero can move

    def init(self, param: jax.Array) -> Factors | Square:
        lead, cut, shape = self.layout.lead, self.layout.cut, param.shape
        if not self.layout.rows:
            return Square(jnp.zeros(shape, jnp.float32))
        return Factors(jnp.zeros(shape[:cut], jnp.float32), jnp.zeros(shape[:lead] + shape[cut:], jnp.float32))

    def update(
        self, gradient: jax.Array, moments: Factors | Square, param: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Factors | Square]:
        g = gradient.astype(jnp.float32)
        new = count.astype(jnp.float32) ** -self.decay_power
        squared = g**2 + self.floor
        made: Factors | Square
        if isinstance(moments, Factors):
            lead, cut, dims = self.layout.lead, self.layout.cut, range(g.ndim)
            row = moments.row + new * (jnp.mean(squared, axis=tuple(dims[cut:])) - moments.row)
            col = moments.col + new * (jnp.mean(squared, axis=tuple(dims[lead:cut])) - moments.col)
            made = Factors(row, col)
            share = row / jnp.mean(row, axis=tuple(dims[lead:cut]), keepdims=True)
            g = g * jax.lax.rsqrt(jnp.expand_dims(share, tuple(dims[cut:])))
            g = g * jax.lax.rsqrt(jnp.expand_dims(col, tuple(dims[lead:cut])))
        else:
            made = Square(moments.square + new * (squared - moments.square))
            g = g * jax.lax.rsqrt(made.square)
        g = g / jnp.maximum(1.0, self._rms(g) / self.clip)
        return g * jnp.maximum(self.smallest, self._rms(param.astype(jnp.float32))), made

    def _rms(self, x: jax.Array) -> jax.Array:
        """Return the root mean square of each layer's parameter."""
        return jnp.sqrt(jnp.mean(x**2, axis=tuple(range(self.layout.lead, x.ndim)), keepdims=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Momentum:
    """The momentum of Muon."""

    mean: Any


# The quintic of Keller Jordan's reference. Its singular values end between 0.7 and 1.2, after five iterations.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


@dataclass(frozen=True)
class MuonRule:
    """Muon for the matrices of linear layers: momentum with orthonormal rows or columns.

    The momentum is that of the reference and of torch.optim.Muon. `optax.contrib.muon` divides it by a correction for
    its start at zero, which changes the weight of the newest gradient in the first steps.
    """

    layout: ParamLayout
    momentum: float
    scale: str  # "rms" or "width"
    dtype: Any  # of the matrix products

    def init(self, param: jax.Array) -> Momentum:
        return Momentum(jnp.zeros_like(param))

    def update(
        self, gradient: jax.Array, moments: Momentum, param: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Momentum]:
        mean = self.momentum * moments.mean + (1 - self.momentum) * gradient
        ahead = self.momentum * mean + (1 - self.momentum) * gradient
        _, rows, columns = self.layout.matrices
        # Each device orthogonalizes complete matrices of some layers, if the layers divide. Otherwise, the products of
        # a matrix that is split would be summed over the devices in each of the iterations.
        matrices = sharding.by_layer(ahead.reshape(self.layout.matrices))
        made = orthogonalized(matrices, self.dtype).reshape(gradient.shape).astype(jnp.float32)
        factor = 0.2 * max(rows, columns) ** 0.5 if self.scale == "rms" else max(1.0, columns / rows) ** 0.5
        return factor * made, Momentum(mean.astype(param.dtype))


def orthogonalized(x_LIO: jax.Array, dtype: Any) -> jax.Array:
    """Return the nearest matrices with orthonormal rows or columns, approximately, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    is_tall = x_LIO.shape[-2] > x_LIO.shape[-1]
    x = jnp.swapaxes(x_LIO, -1, -2) if is_tall else x_LIO
    x = x.astype(jnp.float32)
    # The Frobenius norm is an upper bound of the spectral norm, for which the iterations converge.
    x = (x / (jnp.sqrt(jnp.sum(x**2, axis=(-2, -1), keepdims=True)) + 1e-7)).astype(dtype)
    for _ in range(ITERATIONS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def placed(state: Tree, params: Tree, layouts: Tree, mesh: Mesh) -> Tree:
    """Return the shapes of an optimizer's state with shardings.

    An array with the shape of its parameter has the parameter's sharding. So has an array that only has fewer blocks
    in some dimension, as far as the sharding divides it. Adafactor's factors follow the letters of their dimensions.
    All other arrays are on every device: they are counters, or of an optimizer that forerun does not know.

    Args:
      state: shapes of the optimizer's state.
      params: the trained parameters, with shardings.
      layouts: the layouts of these parameters, or None if no array has another shape than its parameter.
    """
    known = {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shaped = {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(layouts)}

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        found = _param_path(path, known)
        if found is None:
            return NamedSharding(mesh, PartitionSpec())
        param = known[found]
        if isinstance(layout := shaped.get(found), ParamLayout) and path[-1] in _FACTORS:
            lead, cut, axes = layout.lead, layout.cut, layout.axes
            letters = axes[:cut] if path[-1] == _FACTORS[0] else axes[:lead] + axes[cut:]
            return sharding.stored(mesh, leaf.shape, letters)
        if len(leaf.shape) == len(param.shape):
            return NamedSharding(mesh, sharding.coarsened(param.sharding.spec, leaf.shape, mesh.shape))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(path, leaf)), state
    )


_FACTORS = tuple(jax.tree_util.GetAttrKey(field.name) for field in fields(Factors))


def _param_path(path: Any, known: dict[Any, Any]) -> Any | None:
    """Return the path of the parameter that a part of the state belongs to, or None.

    States contain trees with the structure of the parameters, so the path of a parameter is a part of theirs.
    """
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            if path[start : start + length] in known:
                return path[start : start + length]
    return None


# ---- AdamW with 8-bit moments, in blocks along the last dimension (Dettmers et al., 8-bit Optimizers, 2021) ----
# A block has one float32 scale, its largest magnitude. A code is the nearest of 256 values between -1 and 1 (signed)
# or 0 and 1 (unsigned): the dynamic map of bitsandbytes and torchao, with seven decades and more values in the higher
# ones. The map is computed, not looked up: TPUs are slow at table lookups.
#
# Codes have the shape of their parameter, so they are sharded like it, and a checkpoint does not depend on the mesh.


BLOCK = 128  # most elements of a block: the lanes of a TPU register, so that a block is one row of it
SMALLEST_BLOCK = 32  # with smaller blocks, the scales would need too much of the saved memory
SMALLEST_SIZE = 4096  # parameters with fewer elements in a layer keep 32 bits, as in bitsandbytes
LEVELS = 7  # decades of the map; level i has values between 10^(i - 7) and 10^(i - 6)
ZERO = 127  # the signed code of 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedMoments:
    """The moments of AdamW as codes: the mean is signed. Of the mean square, the root is coded."""

    mean: Any  # uint8, shape of the parameter
    mean_scale: Any  # float32, [..., blocks]
    root: Any  # uint8, shape of the parameter
    root_scale: Any  # float32, [..., blocks]


def block_of(layout: ParamLayout) -> int | None:
    """Return the elements of a block of a parameter, or None if its moments keep 32 bits."""
    layers, last = layout.matrices[0], layout.shape[-1]
    size = 1
    for dim in layout.shape:
        size *= dim
    if size // layers < SMALLEST_SIZE:
        return None
    return next((block for block in range(BLOCK, SMALLEST_BLOCK - 1, -1) if last % block == 0), None)


@dataclass(frozen=True)
class CodedAdamRule:
    """AdamW that decodes its moments, updates them in float32, and codes them again.

    The root of the mean square is coded, and not the mean square as in bitsandbytes: seven decades of the root are 14
    of the square. A square that is rounded to zero next to a mean that is not would give an update of mean / eps. For
    the same reason, a root that is not zero is never coded as zero.
    """

    adam: AdamRule
    block: int

    def init(self, param: jax.Array) -> CodedMoments:
        scale = jnp.zeros((*param.shape[:-1], param.shape[-1] // self.block), jnp.float32)
        return CodedMoments(
            jnp.full(param.shape, ZERO, jnp.uint8), scale, jnp.zeros(param.shape, jnp.uint8), jnp.zeros_like(scale)
        )

    def update(
        self, gradient: jax.Array, moments: CodedMoments, param: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, CodedMoments]:
        g = gradient.astype(jnp.float32)
        mean, square = self._moments(g, moments)
        mean_scale, root_scale = self._largest(mean), self._largest(jnp.sqrt(square))
        # The codes need the largest value of each block first. The barrier makes the compiler compute the moments again
        # in a second pass: it would keep both in float32 otherwise, which costs as much memory as the codes save.
        g, moments, mean_scale, root_scale = jax.lax.optimization_barrier((g, moments, mean_scale, root_scale))
        mean, square = self._moments(g, moments)
        mean_codes = signed_codes(self._share(mean, mean_scale))
        share = self._share(jnp.sqrt(square), root_scale)
        root_codes = jnp.where(share > 0, jnp.maximum(unsigned_codes(share), 1), 0)
        mean_codes, root_codes = (codes.astype(jnp.uint8).reshape(g.shape) for codes in (mean_codes, root_codes))
        return self.adam.direction(mean, square, count), CodedMoments(mean_codes, mean_scale, root_codes, root_scale)

    def _moments(self, g: jax.Array, moments: CodedMoments) -> tuple[jax.Array, jax.Array]:
        """Return the mean and the mean square after the gradient `g`."""
        b1, b2 = self.adam.b1, self.adam.b2
        mean = b1 * self._decoded(signed_values(moments.mean), moments.mean_scale) + (1 - b1) * g
        root = self._decoded(unsigned_values(moments.root), moments.root_scale)
        return mean, b2 * root**2 + (1 - b2) * g**2

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.block)

    def _decoded(self, values: jax.Array, scale: jax.Array) -> jax.Array:
        return (self._blocks(values) * scale[..., None]).reshape(values.shape)

    def _largest(self, x: jax.Array) -> jax.Array:
        """Return the scale of each block."""
        return jnp.max(jnp.abs(self._blocks(x)), axis=-1)

    def _share(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the values of blocks relative to their scale, [..., blocks, block]."""
        return self._blocks(x) / jnp.where(scale > 0, scale, 1.0)[..., None]


def eight_bit_rule(adam: AdamRule, layout: ParamLayout) -> CodedAdamRule | AdamRule:
    """Return the rule of a parameter: with codes, or plain AdamW for a small parameter."""
    block = block_of(layout)
    return adam if block is None else CodedAdamRule(adam, block)


def signed_codes(x: jax.Array) -> jax.Array:
    """Return the codes (int32, 0 to 255) of the values of the signed map that are nearest to `x`."""
    size = _magnitude_codes(jnp.abs(x), 0)
    # The map is not symmetric: 1 has its own code, 255. The value nearest to -1 has the code 0.
    return ZERO + jnp.where(x < 0, -jnp.minimum(size, ZERO), size)


def unsigned_codes(x: jax.Array) -> jax.Array:
    """Return the codes (int32, 0 to 255) of the values of the unsigned map that are nearest to `x`."""
    return _magnitude_codes(x, 1)


def signed_values(codes: jax.Array) -> jax.Array:
    """Return the values (float32) of signed codes."""
    number = codes.astype(jnp.int32) - ZERO
    return jnp.where(number < 0, -1.0, 1.0) * _magnitudes(jnp.abs(number), 0)


def unsigned_values(codes: jax.Array) -> jax.Array:
    """Return the values (float32) of unsigned codes."""
    return _magnitudes(codes.astype(jnp.int32), 1)


def _magnitude_codes(x: jax.Array, more: int) -> jax.Array:
    """Return the codes of values between 0 and 1.

    Level i has 2^(i + more) values: the midpoints of as many equal parts of 0.1 to 1, times 10^(i - 6). The code of the
    first one is 2^(i + more) - more. Zero has the first code and one has the last.
    """
    level = jnp.zeros(x.shape, jnp.int32)
    power = jnp.full(x.shape, 10.0 ** (LEVELS - 1), jnp.float32)
    for i in range(LEVELS - 1):
        # The midpoint between the last value of this level and the first value of the next one.
        above = x > _middle(_value(i, 2 ** (i + more) - 1, more), _value(i + 1, 0, more))
        level = jnp.where(above, i + 1, level)
        power = jnp.where(above, 10.0 ** (LEVELS - 2 - i), power)
    numbers = jnp.left_shift(1, level + more)
    place = jnp.floor((x * power - 0.1) / 0.9 * numbers.astype(jnp.float32)).astype(jnp.int32)
    codes = numbers - more + jnp.clip(place, 0, numbers - 1)
    top = 2 ** (LEVELS + more) - more
    codes = jnp.where(x > _middle(_value(LEVELS - 1, 2 ** (LEVELS - 1 + more) - 1, more), 1.0), top, codes)
    return jnp.where(x < _middle(0.0, _value(0, 0, more)), 0, codes)


def _magnitudes(codes: jax.Array, more: int) -> jax.Array:
    """Return the values of codes, as `_magnitude_codes` numbers them."""
    level = 31 - jax.lax.clz(jnp.maximum(codes + more, 1)) - more
    numbers = jnp.left_shift(1, jnp.maximum(level, 0) + more)
    power = jnp.full(codes.shape, 10.0 ** (1 - LEVELS), jnp.float32)
    for i in range(1, LEVELS):
        power = jnp.where(level >= i, 10.0 ** (i + 1 - LEVELS), power)
    place = (codes + more - numbers).astype(jnp.float32) + 0.5
    values = power * (0.1 + 0.9 * place / numbers.astype(jnp.float32))
    values = jnp.where(codes == 2 ** (LEVELS + more) - more, 1.0, values)
    return jnp.where(codes == 0, 0.0, values)


def _value(level: int, place: int, more: int) -> float:
    return float(10.0 ** (level + 1 - LEVELS) * (0.1 + 0.9 * (place + 0.5) / 2 ** (level + more)))


def _middle(a: float, b: float) -> float:
    return (a + b) / 2
