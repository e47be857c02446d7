"""A keyed permutation of 0 .. size-1 that is computed place by place: no table, whatever the size.

A Feistel network over the next even number of bits is a permutation of a power of four; what falls outside the size
is sent through again until it falls inside (cycle walking, three times on average at the most), which leaves a
permutation of the size itself. Eight rounds of a strong mixing function: a network, not a linear congruence, so
neighbours do not stay neighbours.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
BLOCK = 1 << 14  # places worked on together: what stays in a core's cache
ORDER = f"feistel-{ROUNDS}"  # what a checkpoint's record calls it: a run is never resumed in another order


def permuted(places: ArrayLike, size: int, *key: int) -> NDArray[np.int64]:
    """Where each place goes. The same key gives the same permutation, in every release."""
    at = np.asarray(places, np.int64)
    if at.size and not (at.min() >= 0 and at.max() < size):
        raise IndexError(f"place {at.min()} .. {at.max()} of {size}")
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = _round_keys(key)
    found = at.astype(np.uint64)
    flat = found.reshape(-1)
    for begin in range(0, flat.size, BLOCK):
        flat[begin : begin + BLOCK] = _walked(flat[begin : begin + BLOCK], size, half, keys)
    return found.astype(np.int64)


def _walked(values: NDArray[np.uint64], size: int, half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    found = _once(values, half, keys)
    while (outside := found >= size).any():
        found[outside] = _once(found[outside], half, keys)
    return found


def _once(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of the input moves every bit of the output."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    text = ",".join(map(str, key)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), "<u8").astype(np.uint64)
