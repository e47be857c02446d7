"""AdamW with 8-bit moments, in blocks along the last dimension (Dettmers et al., 8-bit Optimizers, 2021).

A block has one float32 scale, its largest magnitude. A code is the nearest of 256 values between -1 and 1 (signed) or 0
and 1 (unsigned): the dynamic map of bitsandbytes and torchao, with seven decades and more values in the higher ones.
The map is computed, not looked up: TPUs are slow at table lookups.

Codes have the shape of their parameter, so they are sharded like it, and a checkpoint does not depend on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from forerun.methods.parameter_layouts import ParamLayout
from forerun.program.moments import AdamRule

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


def rule_of(adam: AdamRule, layout: ParamLayout) -> CodedAdamRule | AdamRule:
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
