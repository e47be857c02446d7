"""What a step eats: five arrays of one shape, [A, B, S] (accumulation, batch, sequence).

Segments number the documents of a row from 1; 0 is padding. Positions count from 0 inside each
document. `weights` is 1 where the target counts towards the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch(Generic[T]):
    """`T` is an array, an abstract shape or a sharding, as everywhere in forerun."""

    tokens: T  # int32
    targets: T  # int32
    weights: T  # float32
    segments: T  # int32
    positions: T  # int32
