"""What a step eats: five arrays of one shape, [A, B, S] (accumulation, batch, sequence), and what its objective wants
besides, [A, B, ...].

Segments number the documents of a row from 1; 0 is padding. Positions count from 0 inside each
document. `weights` is 1 where the target counts towards the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    extras: dict[str, T] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Mapping[str, T]) -> Batch[T]:
        """From arrays by name: the five, and extras."""
        return cls(**{name: arrays[name] for name in NAMES}, extras={k: v for k, v in arrays.items() if k not in NAMES})


NAMES = ("tokens", "targets", "weights", "segments", "positions")
