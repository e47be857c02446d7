"""The input of a training step.

A batch has five arrays of the shape [A, B, S] (accumulation, batch, sequence), and the extra arrays [A, B, ...] of its
objective. Segments number the documents of a row from 1; 0 is padding. Positions count from 0 inside each document.
`weights` is 1 for targets with loss, else 0.
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
    """The arrays of a step. `T` is an array, an abstract shape or a sharding."""

    tokens: T  # int32
    targets: T  # int32
    weights: T  # float32
    segments: T  # int32
    positions: T  # int32
    extras: dict[str, T] = field(default_factory=dict)  # arrays for the objective only

    @classmethod
    def of(cls, arrays: Mapping[str, T]) -> Batch[T]:
        """Return a batch of named arrays. All except the five arrays become extras."""
        return cls(**{name: arrays[name] for name in NAMES}, extras={k: v for k, v in arrays.items() if k not in NAMES})


NAMES = ("tokens", "targets", "weights", "segments", "positions")
