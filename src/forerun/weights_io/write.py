"""Writing of weights from the devices to safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.safetensors import Selection, Weights, equal_bytes, numpy_dtype
from forerun.hub.snapshot import Snapshot
from forerun.models.families.wrapper import wrapper_of
from forerun.models.keys import Entry, Piece, Tensor, entries, path_text, unused_names
from forerun.models.model_facts import model_for, read_snapshot
from forerun.models.quantization_config import QUANTIZATION, float8_in
from forerun.nn.spec import Tree
from forerun.weights_io.leaves import Copier, Pair, on_cpu, placing_of
from forerun.weights_io.low_precision import Dequantized
from forerun.weights_io.match import Stacked
from forerun.weights_io.read import piece_of
from forerun.weights_io.shards import DTYPES, Planned, Shards, shards_of

# ---- The tensors of a multimodal checkpoint beside those of its text model: copied one at a time ----


@contextmanager
def open_others(source: Snapshot) -> Iterator[Weights | None]:
    """Open the tensors that the text model does not use, and yield them, or None for a text model.

    Gemma 4 E2B has keys and values in its text model, too, that no layer uses. FP8 tensors are presented as bfloat16,
    because an export has no section on FP8.
    """
    config = source.config()
    wrapper, float8 = wrapper_of(config), float8_in(config.get(QUANTIZATION))
    if wrapper is None:
        yield None
        return
    found = read_snapshot(source, f"{source.name}/config.json")
    model = model_for(found.config)
    unused = unused_names(found.family.table, model.specs(), model.stacks)
    with source.open_weights() as weights:
        others: Weights = Selection(weights, lambda name: wrapper.is_other(name) or name in unused)
        yield others if float8 is None else Dequantized(others, float8)


def planned_copies(others: Weights | None) -> list[Planned]:
    """Return the tensors that are copied, with their names, dtypes and shapes."""
    return [Planned(name, info.dtype, info.shape) for name, info in (others or {}).items()]


def copied(others: Weights, tensor: Planned) -> NDArray[Any]:
    """Return the value of a tensor that is copied. Its pages of the mapped file are released."""
    value = np.array(others.view(tensor.name))
    others.release(tensor.name)
    return value


def first_difference(others: Weights, written: Weights) -> str | None:
    """Return the name of a tensor whose dtype, shape or bytes differ in `written`, or None if all are equal."""
    if set(others) != set(written):
        return min(set(others) ^ set(written))
    return next((name for name in others if not _is_equal(others, written, name)), None)


def _is_equal(others: Weights, written: Weights, name: str) -> bool:
    if (others[name].dtype, others[name].shape) != (written[name].dtype, written[name].shape):
        return False
    same = equal_bytes(others.view(name), written.view(name))
    others.release(name)
    written.release(name)
    return same


SHARD_BYTES = 5 * 10**9


# ---- The parameters ----


def write_params(
    folder: Path,
    params: Tree,
    table: Iterable[Tensor],
    model: Stacked,
    dtype: str | Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
    others: Weights | None = None,
) -> list[Path]:
    """Write the parameters to safetensors files, and return their paths, including the index if there is one.

    The files get their final names only when all of them are complete. Host memory beyond the arrays is bounded by the
    largest tensor.

    Args:
        folder: The folder of the export.
        params: The parameters. All shards must be in this process.
        table: The tensor table of the family.
        model: The model.
        dtype: One dtype for all tensors, or one per tensor name, as `BF16` or `bfloat16`.
        shard_bytes: The largest size of a file, unless a single tensor is larger.
        others: Tensors that are copied unchanged.
    """
    leaves = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if not all(leaf.is_fully_addressable for leaf in leaves.values()):
        raise ValueError("write_params needs every shard in this process")
    found = {entry.name: entry for entry in entries(table, model.specs(), model.stacks)}
    planned = [Planned(name, tensor_dtype(dtype, name), entry.shape) for name, entry in found.items()]
    planned += planned_copies(others)

    files = shards_of(planned, shard_bytes)
    with Copier(leaf.sharding for leaf in leaves.values()) as copier, Shards(folder, files) as shards:

        def written(tensor: Planned) -> NDArray[Any]:
            if others is not None and tensor.name in others:
                return copied(others, tensor)
            return value_of(found[tensor.name], tensor, leaves, copier)

        shards.write(written)
        return shards.finish()


def write_tree(folder: Path, params: Tree, dtype: str) -> list[Path]:
    """Write all parameters of a custom model in `dtype`, and return the paths of the files.

    A tensor has the path of its parameter in `specs()` as its name.
    """
    leaves = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    planned = [Planned(name, tensor_dtype(dtype, name), leaf.shape) for name, leaf in leaves.items()]

    def written(tensor: Planned) -> NDArray[Any]:
        value = np.asarray(leaves[tensor.name]).astype(numpy_dtype(tensor.dtype), order="C")
        require_float16(tensor, value)
        return value

    with Shards(folder, shards_of(planned, SHARD_BYTES)) as shards:
        shards.write(written)
        return shards.finish()


def value_of(entry: Entry, tensor: Planned, leaves: Mapping[str, jax.Array], copier: Copier) -> NDArray[Any]:
    """Return a tensor in the layout of its file, assembled from the leaves."""
    value = np.empty(entry.shape, numpy_dtype(tensor.dtype))
    for piece in entry.pieces:
        copier.copy(_pairs(piece_of(value, entry, piece), leaves[piece.path], piece))
    require_float16(tensor, value)
    return value


def require_float16(tensor: Planned, value: NDArray[Any]) -> None:
    """Raise a UserError if a tensor is written as float16 and has values that float16 cannot represent."""
    if tensor.dtype == "F16" and not np.isfinite(value).all():
        raise float16_error(tensor.name)


def float16_error(name: str) -> UserError:
    """Return the error for a tensor that float16 cannot represent."""
    return UserError(
        "E-WEIGHTS-010",
        f"{name} does not fit float16",
        why="it has values beyond 65504, or values that are not finite",
        fix="export as bfloat16 or float32",
    )


def _pairs(target: NDArray[Any], leaf: jax.Array, piece: Piece) -> list[Pair]:
    """Return pairs of a part of `target` and the values for it. `target` has one dimension per letter."""
    if on_cpu(leaf.sharding):
        turned = target.transpose(piece.order)
        shards = [(shard.index, np.asarray(shard.data)) for shard in leaf.addressable_shards if shard.replica_id == 0]
        lead = len(piece.lead)
        held = [(index, data, _place(index[:lead], piece.lead, leaf.shape)) for index, data in shards]
        return [(turned[index[lead:]], data[place]) for index, data, place in held if place is not None]
    gathered = _gather(leaf.sharding, piece.order, target.dtype, len(piece.lead))(leaf, *piece.lead)
    return [
        (target[shard.index], np.asarray(shard.data)) for shard in gathered.addressable_shards if shard.replica_id == 0
    ]


def _place(parts: tuple[slice, ...], lead: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the index of a layer or an expert in a shard, or None if it is not in the shard.

    Args:
        parts: The part of the first dimensions that the shard has.
        lead: The index of the layer, and of the expert if any.
        shape: The dimensions of the complete array.
    """
    ranges = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=False)]
    inside = all(start <= n < stop for n, (start, stop) in zip(lead, ranges, strict=True))
    return tuple(n - start for n, (start, _) in zip(lead, ranges, strict=True)) if inside else None


@lru_cache(maxsize=256)
def _gather(sharding: Any, order: tuple[int, ...], dtype: Any, lead: int) -> Any:
    """Return a compiled function that selects a layer or an expert, in the tensor's dtype and order of dimensions.

    The result is still split over the devices.
    """
    back = tuple(order.index(n) for n in range(len(order)))
    wide = dtype.itemsize == 8  # jax has no 64-bit types by default; numpy widens the result later

    def gather(leaf: jax.Array, *numbers: Any) -> jax.Array:
        one = leaf
        for number in numbers:
            one = jax.lax.dynamic_index_in_dim(one, number, 0, keepdims=False)
        return one.transpose(back).astype(one.dtype if wide else dtype)

    return jax.jit(gather, out_shardings=placing_of(sharding, order, lead))


def tensor_dtype(dtype: str | Mapping[str, str], name: str) -> str:
    """Return the safetensors dtype of a tensor. Raise a UserError if forerun does not write it."""
    if isinstance(dtype, str):
        wanted = dtype
    elif name in dtype:
        wanted = dtype[name]
    else:
        raise ValueError(f"no dtype is given for {name}")
    wanted = DTYPES.get(wanted, wanted)
    if wanted not in DTYPES.values():
        raise UserError(
            "E-WEIGHTS-011",
            f"weights cannot be written as {wanted}",
            why=f"{name} is a tensor of floats",
            fix=f"choose one of {', '.join(DTYPES)}",
        )
    return wanted
