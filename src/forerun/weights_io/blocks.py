"""Fast copies between strided views of host memory: several threads copy blocks that fit in a core's cache.

numpy makes a transposed copy element by element. A CPU device of XLA transposes a block at memory speed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 21
SMALLEST_TURN = 1 << 14  # elements; smaller blocks are not worth a call into XLA
ALIGNMENT_BYTES = 64  # memory with this alignment becomes a JAX array without a copy
MAX_THREADS = 8

Pair = tuple[NDArray[Any], NDArray[Any]]


class Copier:
    """A thread pool that copies pairs of views. A CPU device, if the shardings have one, does the transposes."""

    def __init__(self, shardings: Iterable[jax.sharding.Sharding]) -> None:
        devices: set[Any] = {device for sharding in shardings for device in sharding.addressable_devices}
        self._device = next((device for device in devices if device.platform == "cpu"), None)
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "weights")

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copy the second view of each pair into the first, cast to its dtype. Return when all copies are done."""
        for _ in self._threads.map(self._block, [block for pair in pairs for block in _blocks(*pair)]):
            pass

    def _block(self, pair: Pair) -> None:
        target, source = pair
        turned = source.size >= SMALLEST_TURN and _fastest(source) != _fastest(target)
        if turned and self._device is not None and source.dtype.itemsize < 8:  # jax would narrow 64 bits
            source = np.asarray(jax.device_put(source, self._device))
        if source.dtype == ml_dtypes.bfloat16 and target.dtype == np.float32:
            # A bfloat16 is the upper half of a float32. A shift of integers is vectorized, the cast is not.
            np.left_shift(source.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
        else:
            with np.errstate(all="ignore"):
                target[...] = source


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return uninitialized memory that XLA can use without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    buffer: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return buffer


def _blocks(target: NDArray[Any], source: NDArray[Any]) -> Iterator[Pair]:
    """Yield pairs of at most BLOCK_BYTES, in the target's memory order, split along the source's slowest dimension."""
    if not target.size:
        return
    order = sorted(range(target.ndim), key=lambda dim: -target.strides[dim])
    yield from _cut(target.transpose(order), source.transpose(order))


def _cut(target: NDArray[Any], source: NDArray[Any]) -> Iterator[Pair]:
    if max(source.nbytes, target.nbytes) <= BLOCK_BYTES:
        yield target, source
        return
    dim = max((n for n in range(source.ndim) if source.shape[n] > 1), key=lambda n: source.strides[n])
    wanted = -(-max(source.nbytes, target.nbytes) // BLOCK_BYTES)
    step = -(-source.shape[dim] // wanted)
    for start in range(0, source.shape[dim], step):
        part = (*(slice(None),) * dim, slice(start, start + step))
        yield from _cut(target[part], source[part])


def _fastest(array: NDArray[Any]) -> int:
    """Return the dimension whose elements are adjacent in memory."""
    dims = [n for n in range(array.ndim) if array.shape[n] > 1]
    return min(dims, key=lambda n: array.strides[n], default=0)
