"""Parameters that are being read: their shards on the devices are filled layer by layer.

On CPU devices, shards are host memory that is filled in place and then becomes a JAX array without a copy. On other
devices, each device receives its part of a tensor in the layout of the file. A compiled program then transposes, casts
and stores it there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.models.keys import Piece
from forerun.nn.sharding import stored
from forerun.nn.weights.quantized import Quantized, quantized

IN_FLIGHT_BYTES = 1 << 28  # limit for tensors that are on the devices and not yet stored in their leaf

Box = tuple[tuple[int, int], ...]


class WeightLeaf(Protocol):
    """A parameter that is filled piece by piece."""

    def store(self, piece: Piece, source: NDArray[Any]) -> None:
        """Store a piece. `source` has the layout of the file, with one dimension per letter.

        The memory of `source` may be reused after the call.
        """

    def array(self) -> Any:
        """Return the parameter. Call it once, after all pieces are stored."""


class HostLeaf:
    """A parameter on CPU devices. Equal shards share memory, which is safe because JAX arrays are immutable."""

    def __init__(self, wanted: jax.ShapeDtypeStruct, copier: Copier) -> None:
        self._wanted, self._copier = wanted, copier
        places = wanted.sharding.addressable_devices_indices_map(wanted.shape)
        self._devices: dict[jax.Device, Box] = {device: _box(index, wanted.shape) for device, index in places.items()}
        self._shards = {
            box: aligned(tuple(end - start for start, end in box), wanted.dtype) for box in self._devices.values()
        }

    def store(self, piece: Piece, source: NDArray[Any]) -> None:
        turned = source.transpose(piece.order)
        pairs = []
        for box, shard in self._shards.items():
            lead = len(piece.lead)
            if all(start <= n < end for n, (start, end) in zip(piece.lead, box[:lead], strict=True)):
                place = tuple(n - start for n, (start, _) in zip(piece.lead, box[:lead], strict=True))
                pairs.append((shard[place], turned[_slices(box[lead:])]))
        self._copier.copy(pairs)

    def array(self) -> jax.Array:
        parts = [jax.device_put(self._shards[box], device, may_alias=True) for device, box in self._devices.items()]
        jax.block_until_ready(parts)
        self._shards = {}
        return jax.make_array_from_single_device_arrays(self._wanted.shape, self._wanted.sharding, parts)


class DeviceLeaf:
    """A parameter on other devices."""

    def __init__(self, wanted: jax.ShapeDtypeStruct) -> None:
        self._sharding, self._in_flight_bytes = wanted.sharding, 0
        self._array: jax.Array = _zeros(wanted.shape, wanted.dtype, wanted.sharding)()

    def store(self, piece: Piece, source: NDArray[Any]) -> None:
        if source.dtype.itemsize == 8:  # jax would convert float64 with its own rounding
            source = source.astype(np.float32)
        placing = placing_of(self._sharding, piece.order, len(piece.lead))
        put = jax.make_array_from_callback(source.shape, placing, lambda index: source[index])
        self._array = _update(self._sharding, piece.order)(self._array, put, *map(np.int32, piece.lead))
        put.block_until_ready()
        self._in_flight_bytes += put.nbytes
        if self._in_flight_bytes > IN_FLIGHT_BYTES:
            self._array.block_until_ready()
            self._in_flight_bytes = 0

    def array(self) -> jax.Array:
        return self._array


class QuantizedLeaf:
    """A quantized parameter. The devices quantize one tensor at a time, so only one dense layer is in memory."""

    def __init__(self, wanted: Quantized[jax.ShapeDtypeStruct]) -> None:
        codes, scales = wanted.codes, wanted.scales
        like: Quantized[Any] = wanted
        self._made: Quantized[jax.Array] = replace(
            like,
            codes=_zeros(codes.shape, codes.dtype, codes.sharding)(),
            scales=_zeros(scales.shape, scales.dtype, scales.sharding)(),
        )
        self._lead = len(codes.shape) - 3  # layers and experts
        self._places = (codes.sharding, scales.sharding)

    def store(self, piece: Piece, source: NDArray[Any]) -> None:
        source = source.astype(np.float32) if source.dtype.itemsize == 8 else source
        axes = "X" * (self._lead - len(piece.lead)) + self._made.axes  # a tensor may have all experts of a layer
        shape = tuple(source.shape[n] for n in piece.order)
        placing = placing_of(stored(self._places[0].mesh, shape, axes), piece.order, 0)
        put = jax.make_array_from_callback(source.shape, placing, lambda index: source[index])
        self._made = _quantize(self._places, piece.order)(self._made, put, *map(np.int32, piece.lead))
        jax.block_until_ready(self._made)

    def array(self) -> Quantized[jax.Array]:
        return self._made


def leaf_of(wanted: Any, copier: Copier) -> WeightLeaf:
    """Return an empty leaf for a shape with a sharding, or for a `Quantized` of such shapes."""
    if isinstance(wanted, Quantized):
        return QuantizedLeaf(wanted)
    return HostLeaf(wanted, copier) if on_cpu(wanted.sharding) else DeviceLeaf(wanted)


def on_cpu(sharding: jax.sharding.Sharding) -> bool:
    """Return whether all devices of a sharding are CPUs."""
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def placing_of(sharding: NamedSharding, order: tuple[int, ...], lead: int) -> NamedSharding:
    """Return the sharding of a piece in the tensor's order of dimensions.

    Args:
        sharding: The sharding of its leaf.
        order: The order of dimensions that `Piece` describes.
        lead: The number of dimensions of the leaf that the piece does not have: layers and experts.
    """
    rank = len(order) + lead
    axes = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))[lead:]
    return NamedSharding(sharding.mesh, PartitionSpec(*(axes[order.index(n)] for n in range(len(order)))))


@lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@lru_cache(maxsize=256)
def _update(sharding: NamedSharding, order: tuple[int, ...]) -> Any:
    def update(leaf: jax.Array, tensor: jax.Array, *lead: jax.Array) -> jax.Array:
        return _put(leaf, tensor.transpose(order).astype(leaf.dtype), lead)

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


@lru_cache(maxsize=256)
def _quantize(places: tuple[NamedSharding, NamedSharding], order: tuple[int, ...]) -> Any:
    def update(leaf: Quantized[jax.Array], tensor: jax.Array, *lead: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = quantized(tensor.transpose(order), leaf)
        return _put(leaf.codes, made.codes, lead), _put(leaf.scales, made.scales, lead)

    compiled = jax.jit(update, donate_argnums=0, out_shardings=places)

    def updated(leaf: Quantized[jax.Array], tensor: jax.Array, *lead: Any) -> Quantized[jax.Array]:
        codes, scales = compiled(leaf, tensor, *lead)
        return replace(leaf, codes=codes, scales=scales)

    return updated


def _put(leaf: jax.Array, part: jax.Array, lead: tuple[jax.Array, ...]) -> jax.Array:
    """Return the leaf with a part at an index of its first dimensions."""
    if not lead:
        return part
    ones = part.reshape(*(1,) * len(lead), *part.shape)
    return jax.lax.dynamic_update_slice(leaf, ones, (*lead, *(np.int32(0),) * part.ndim))


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ranges)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


# ---- Fast copies between strided views of host memory: several threads copy blocks that fit in a core's cache ----
# numpy makes a transposed copy element by element. A CPU device of XLA transposes a block at memory speed.


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
