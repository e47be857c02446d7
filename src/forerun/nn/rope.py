"""Rotary position embeddings (RoPE), with the scalings of all supported families.

Letters: B batch, S sequence, H heads, D head. The configuration classes do not need jax; only `angles` and `rotate`
compute with jax arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.config.schema import RopeScaling

Angles = tuple[Any, Any]  # cos and sin, [B, S, 1, dims / 2]


class InterleavedAngles(NamedTuple):
    """Angles for pairs of neighbouring dimensions, [B, S, 1, dims]. Each pair has its cos twice, and -sin and sin."""

    cos: Any
    sin: Any


class HalvesByProduct(NamedTuple):
    """Angles for pairs of the two halves, [B, S, 1, dims], that a product exchanges. Each pair has both twice."""

    cos: Any
    sin: Any


@dataclass(frozen=True)
class Linear:
    """Linear scaling: positions are divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Yarn:
    """YaRN: high frequencies stay, low frequencies are divided by `factor`, with a linear ramp in between."""

    factor: float
    original: int  # context length before scaling, in tokens
    fast: float = 32.0  # pairs with at least this many rotations in the original context stay
    slow: float = 1.0  # pairs with at most this many rotations are divided by `factor`
    attention: float = 1.0  # factor for cos and sin
    truncate: bool = True  # round the ends of the ramp to integer pair indices


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: each pair has its own factor, and a second one for sequences beyond the original context."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int  # context length before scaling, in tokens
    attention: float = 1.0  # factor for cos and sin


@dataclass(frozen=True)
class Proportional:
    """Gemma 4: only the first pairs turn, with the frequencies that they have if all pairs turn.

    Pairs are still elements of the two halves of the whole head. That is different from a rotation of the first
    dimensions only (`Rope.dims`).
    """

    share: float  # of the pairs that turn
    factor: float = 1.0  # positions are divided by it


# A float32 cannot represent the product of a larger position and a frequency well: at a million, neighbouring values
# are 0.06 radians apart. Longer sequences use a sum of two smaller angles.
SPLIT_POSITIONS, COARSE = 1 << 16, 1 << 10

Scaling = RopeScaling | Linear | Yarn | LongRope | Proportional  # RopeScaling is Llama 3's


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer."""

    theta: float
    dims: int  # the first dimensions of each head are rotated; the rest stay unchanged
    scaling: Scaling | None = None
    interleaved: bool = False  # a pair is two neighbouring dimensions (GLM), not one of each half


def frequencies(rope: Rope, *, long: bool = False) -> Any:
    """Return the frequency of each pair in radians per position, float32. `long` affects LongRope only."""
    pairs = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    plain = (np.float32(1) / np.float32(rope.theta) ** pairs).astype(np.float32)
    match rope.scaling:
        case None:
            return plain
        case Linear(factor):
            return plain / np.float32(factor)
        case LongRope() as scaling:
            return plain / np.asarray(scaling.long if long else scaling.short, np.float32)
        case Proportional(share, factor):
            turning = np.arange(rope.dims // 2) < int(share * rope.dims // 2)
            return np.where(turning, plain / np.float32(factor), np.float32(0))
        case Yarn() as scaling:
            kept = 1 - _ramp(rope, scaling)
            return (plain / scaling.factor * (1 - kept) + plain * kept).astype(np.float32)
        case scaling:
            # Llama 3: 1 for wavelengths well inside the original context, 0 well beyond it, linear in between.
            wavelengths = 2 * math.pi / plain
            inside = (scaling.original / wavelengths - scaling.low) / (scaling.high - scaling.low)
            inside = np.clip(inside, 0.0, 1.0)
            return (plain * (inside + (1 - inside) / scaling.factor)).astype(np.float32)


def _ramp(rope: Rope, scaling: Yarn) -> Any:
    """Return YaRN's ramp over the pairs: 0 for high frequencies, 1 for low ones."""

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes `turns` rotations in the original context."""
        return rope.dims * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    span = high - low or 0.001
    return np.clip((np.arange(rope.dims // 2, dtype=np.float32) - low) / span, 0, 1)


def angles(
    rope: Rope, positions_BS: Any, segments_BS: Any, *, by_product: bool = False, longest: int | None = None
) -> Angles:
    """Return cos and sin of the rotation of each token and pair, [B, S, 1, dims / 2], or one of the named tuples.

    They are in float32, because bfloat16 cannot represent positions beyond 256 exactly.

    Args:
        rope: The dimensions and frequencies.
        positions_BS: The position of each token in its document.
        segments_BS: The document of each token.
        by_product: Whether `rotate` exchanges the halves by a matrix product. The values are the same.
        longest: The number of positions that a text can have, if the arrays have only its newest tokens. None: S.
    """
    import jax.numpy as jnp

    beyond = None
    if isinstance(rope.scaling, LongRope):
        beyond = _lengths(positions_BS, segments_BS)[..., None, None] > rope.scaling.original

    def times(numbers_BS: Any, of_frequencies: Callable[[Any], Any]) -> Any:
        each = of_frequencies(_per_angle(rope))
        each = each if beyond is None else jnp.where(beyond, of_frequencies(_per_angle(rope, long=True)), each)
        return numbers_BS.astype(jnp.float32)[..., None, None] * each

    if max(positions_BS.shape[1], longest or 0) <= SPLIT_POSITIONS:
        radians = times(positions_BS, lambda frequencies: frequencies)
    else:
        coarse = times(positions_BS // COARSE, _coarse_angles)
        radians = coarse + times(positions_BS % COARSE, lambda frequencies: frequencies)
    factor = rope.scaling.attention if isinstance(rope.scaling, Yarn | LongRope) else 1.0
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    cos, sin = (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
    if rope.interleaved:
        return InterleavedAngles(cos, jnp.where(np.arange(rope.dims) % 2 == 0, -sin, sin))
    if by_product:
        return HalvesByProduct(*(jnp.concatenate((x, x), axis=-1) for x in (cos, sin)))
    return cos, sin


def _coarse_angles(frequencies: Any) -> Any:
    """Return the angles of COARSE positions without full turns, computed in float64, so that products stay precise."""
    radians = frequencies.astype(np.float64) * COARSE
    return (radians - 2 * np.pi * np.round(radians / (2 * np.pi))).astype(np.float32)


def _per_angle(rope: Rope, *, long: bool = False) -> Any:
    """Return the frequency of each angle: one for each pair, or twice the same for interleaved pairs."""
    found = frequencies(rope, long=long)
    return np.repeat(found, 2) if rope.interleaved else found


def _turn(dims: int) -> Any:
    """Return the matrix that exchanges the halves and negates the new first one."""
    half, zero = np.eye(dims // 2), np.zeros((dims // 2, dims // 2))
    return np.block([[zero, half], [-half, zero]])


def _lengths(positions_BS: Any, segments_BS: Any) -> Any:
    """Return the length of each token's document, [B, S]: its own length, not that of the packed row."""
    import jax
    import jax.numpy as jnp

    def row(positions_S: Any, segments_S: Any) -> Any:
        ends = jax.ops.segment_max(positions_S, segments_S, num_segments=positions_S.shape[0] + 1)
        return ends[segments_S] + 1

    return jax.vmap(row)(positions_BS, jnp.clip(segments_BS, 0, positions_BS.shape[1]))


def rotate(x_BSHD: Any, angles: Angles) -> Any:
    """Return `x_BSHD` rotated by `angles`.

    A pair is an element of the first half of the rotated dimensions and one of the second (the Hugging Face layout).
    With InterleavedAngles, it is two neighbouring dimensions.
    """
    import jax.numpy as jnp

    cos, sin = angles
    by_product = isinstance(angles, InterleavedAngles | HalvesByProduct)
    dims = cos.shape[-1] if by_product else 2 * cos.shape[-1]
    turning = x_BSHD[..., :dims]
    if by_product:
        from forerun.nn.rotation import rotate_by_product

        # The permutation matrix exchanges neighbouring dimensions, or the halves with a negative sign.
        is_interleaved = isinstance(angles, InterleavedAngles)
        other = np.eye(dims)[np.arange(dims) ^ 1] if is_interleaved else _turn(dims)
        turned = rotate_by_product(turning, cos, sin, jnp.asarray(other, x_BSHD.dtype))
    else:
        first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x_BSHD.dtype)
    return turned if dims == x_BSHD.shape[-1] else jnp.concatenate((turned, x_BSHD[..., dims:]), axis=-1)


def attention_factor(factor: float, given: float | None, original: int, *, kind: str) -> float:
    """Return the factor for cos and sin: `given`, or the default formula of YaRN or LongRope if it is None."""
    if given is not None:
        return given
    if kind == "yarn":
        return yarn_factor(factor)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cos and sin at a scaling of positions by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def smallest_period(items: Sequence[Any]) -> int:
    """Return the length of the shortest prefix that, repeated, gives `items`. The last repetition may be incomplete."""
    for length in range(1, len(items) + 1):
        if all(item == items[n % length] for n, item in enumerate(items)):
            return length
    return 1
