"""A keyed permutation of 0 .. size-1 that is computed place by place, without a table.

A Feistel network over an even number of bits is a permutation of 0 .. 4^n - 1. A result that is not below the size is
sent through the network again until it is (cycle walking; at most three more passes on average). The result is a
permutation of 0 .. size-1. The network has eight rounds of a strong mixing function. Unlike a linear congruence, it
does not keep neighbours together.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
BLOCK = 1 << 14  # places that are computed together; their arrays fit in a core's cache
ORDER = f"feistel-{ROUNDS}"  # name of this order in a checkpoint's record: a run is never resumed in another order


def permuted(places: ArrayLike, size: int, *key: int) -> NDArray[np.int64]:
    """Return the number that the permutation assigns to each place.

    The same key gives the same permutation in every release.

    Args:
      places: numbers from 0 to size - 1.
      size: size of the permutation.
      key: integers that select the permutation, such as seed and epoch.

    Raises:
      IndexError: a place is outside the size.
    """
    at = np.asarray(places, np.int64)
    if at.size and not (at.min() >= 0 and at.max() < size):
        raise IndexError(f"place {at.min()} .. {at.max()} of {size}")
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = _round_keys(key)
    found = at.astype(np.uint64)
    flat = found.reshape(-1)
    for begin in range(0, flat.size, BLOCK):
        flat[begin : begin + BLOCK] = _cycle_walk(flat[begin : begin + BLOCK], size, half, keys)
    return found.astype(np.int64)


def permuted_within(
    places: NDArray[np.int64], sizes: NDArray[np.int64], numbers: NDArray[np.int64], *key: int
) -> NDArray[np.int64]:
    """Return the number that a permutation assigns to each place, where every place has a permutation of its own.

    The permutation of place i has the size `sizes[i]` and is selected by `key` and `numbers[i]`. Many small
    permutations are computed together, which is much faster than one call of `permuted` for each.

    Args:
      places: numbers from 0 to sizes - 1.
      sizes: sizes of the permutations.
      numbers: numbers that are not negative and select the permutations.
      key: integers that select all of them, such as seed and epoch.
    """
    with np.errstate(over="ignore"):
        tweaks = _mix((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    halves = np.maximum(1, (_bit_lengths(sizes - 1) + 1) // 2).astype(np.uint64)
    limits = sizes.astype(np.uint64)
    keys = _round_keys(key)[:, None]
    found = _once(places.astype(np.uint64), halves, keys ^ tweaks)
    while len(outside := np.flatnonzero(found >= limits)):
        found[outside] = _once(found[outside], halves[outside], keys ^ tweaks[outside])
    return found.astype(np.int64)


def keyed_number(size: int, *key: int) -> int:
    """Return a number from 0 to size - 1 that the key selects."""
    return int(_round_keys(key)[0]) % size


def _cycle_walk(values: NDArray[np.uint64], size: int, half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the results of the network, which is repeated for those outside the size (cycle walking)."""
    found = _once(values, half, keys)
    while (outside := found >= size).any():
        found[outside] = _once(found[outside], half, keys)
    return found


def _once(
    values: NDArray[np.uint64], half: np.uint64 | NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return the results of one pass through the Feistel network. `half` is half its number of bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64, in which every bit of the input affects every bit of the output."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    text = ",".join(map(str, key)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), "<u8").astype(np.uint64)


def _bit_lengths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of bits of each value, as `int.bit_length` does. Values are below 2^53."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)
