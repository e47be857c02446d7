"""Rotary positions: what turns how fast, with every scaling of the families. B batch, S sequence, H heads, D head.

Descriptions are plain data, free of jax; only `angles` and `rotate` touch arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config.schema import RopeScaling

Angles = tuple[Any, Any]  # cos and sin, [B, S, 1, dims / 2]


@dataclass(frozen=True)
class Linear:
    """Positions pressed together by a factor."""

    factor: float


@dataclass(frozen=True)
class Yarn:
    """Fast pairs turn as before, slow ones by 1 / factor, and a ramp between the two."""

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0  # cos and sin are multiplied by it
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """Each pair has a factor of its own, and another one in sequences beyond the original context."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention: float = 1.0


Scaling = RopeScaling | Linear | Yarn | LongRope  # RopeScaling is Llama 3's


@dataclass(frozen=True)
class Rope:
    """`dims` of each head turn, the rest stays."""

    theta: float
    dims: int
    scaling: Scaling | None = None


def frequencies(rope: Rope, *, long: bool = False) -> Any:
    """Radians per position for each pair, float32. `long` matters to LongRope only."""
    import numpy as np

    pairs = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    plain = (np.float32(1) / np.float32(rope.theta) ** pairs).astype(np.float32)
    match rope.scaling:
        case None:
            return plain
        case Linear(factor):
            return plain / np.float32(factor)
        case LongRope() as scaling:
            return plain / np.asarray(scaling.long if long else scaling.short, np.float32)
        case Yarn() as scaling:
            kept = 1 - _ramp(rope, scaling)
            return (plain / scaling.factor * (1 - kept) + plain * kept).astype(np.float32)
        case scaling:
            # 1 for wavelengths well inside the original context, 0 well beyond it, straight in between.
            wavelengths = 2 * math.pi / plain
            inside = (scaling.original / wavelengths - scaling.low) / (scaling.high - scaling.low)
            inside = np.clip(inside, 0.0, 1.0)
            return (plain * (inside + (1 - inside) / scaling.factor)).astype(np.float32)


def _ramp(rope: Rope, scaling: Yarn) -> Any:
    """0 for pairs that turn fast, 1 for slow ones."""
    import numpy as np

    def pair(turns: float) -> float:
        """The pair that makes so many turns in the original context."""
        return rope.dims * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    span = high - low or 0.001
    return np.clip((np.arange(rope.dims // 2, dtype=np.float32) - low) / span, 0, 1)


def angles(rope: Rope, positions_BS: Any, segments_BS: Any) -> Angles:
    """In float32: positions beyond 256 are not exact in bfloat16."""
    import jax.numpy as jnp

    turns = positions_BS.astype(jnp.float32)[..., None, None]
    if isinstance(rope.scaling, LongRope):
        beyond = _lengths(positions_BS, segments_BS)[..., None, None] > rope.scaling.original
        radians = turns * jnp.where(beyond, frequencies(rope, long=True), frequencies(rope))
    else:
        radians = turns * frequencies(rope)
    factor = rope.scaling.attention if isinstance(rope.scaling, Yarn | LongRope) else 1.0
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _lengths(positions_BS: Any, segments_BS: Any) -> Any:
    """For each token, how long its document is: a packed one is as long as it is by itself."""
    import jax
    import jax.numpy as jnp

    def row(positions_S: Any, segments_S: Any) -> Any:
        ends = jax.ops.segment_max(positions_S, segments_S, num_segments=positions_S.shape[0] + 1)
        return ends[segments_S] + 1

    return jax.vmap(row)(positions_BS, jnp.clip(segments_BS, 0, positions_BS.shape[1]))


def rotate(x_BSHD: Any, angles: Angles) -> Any:
    """The first half of what turns against the second (the Hugging Face layout)."""
    import jax.numpy as jnp

    cos, sin = angles
    dims = 2 * cos.shape[-1]
    turning = x_BSHD.astype(jnp.float32)[..., :dims]
    first, second = jnp.split(turning, 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x_BSHD.dtype)
    return turned if dims == x_BSHD.shape[-1] else jnp.concatenate((turned, x_BSHD[..., dims:]), axis=-1)


def attention_factor(factor: float, given: float | None, original: int, *, kind: str) -> float:
    """What cos and sin are multiplied by, where the checkpoint does not say: YaRN's and LongRope's own formulae."""
    if given is not None:
        return given
    if factor <= 1:
        return 1.0
    return 0.1 * math.log(factor) + 1.0 if kind == "yarn" else math.sqrt(1 + math.log(factor) / math.log(original))


def smallest_period(items: Sequence[Any]) -> int:
    """The shortest beginning that, repeated, gives the whole; the last repetition may be cut off."""
    for length in range(1, len(items) + 1):
        if all(item == items[n % length] for n, item in enumerate(items)):
            return length
    return 1
