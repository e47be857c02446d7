"""A checkpoint's weights onto the devices: from the mapped file to each shard, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from numpy.typing import NDArray

from forerun.exchange.blocks import Copier
from forerun.exchange.leaves import Leaf, leaf_of
from forerun.exchange.match import Stacked, matches
from forerun.hub.weights import Weights
from forerun.models.keys import Entry, Piece, Tensor, path_text
from forerun.nn.quantized import Quantized
from forerun.nn.spec import Tree

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


def no_progress(done_bytes: int, total_bytes: int) -> None:
    pass


def read_params(
    weights: Weights, table: Iterable[Tensor], model: Stacked, wanted: Tree, on_progress: OnProgress = no_progress
) -> Tree:
    """The model's parameters as `wanted` says: a tree of `jax.ShapeDtypeStruct` with shardings. Where it has a
    `Quantized` in the place of a dense weight, that is what the tensors become, layer by layer.

    Host memory beyond the arrays is bounded by the largest tensor. On several hosts each puts the shards of its own
    devices; all of them make the same call.
    """
    found = matches(weights, table, model)
    flat, structure = jax.tree_util.tree_flatten_with_path(wanted, is_leaf=_is_quantized)
    shapes = {path_text(path) + (".value" if _is_quantized(leaf) else ""): leaf for path, leaf in flat}
    total, done = sum(weights[match.name].data_bytes for match in found), 0
    with Copier(leaf.sharding for leaf in jax.tree.leaves(wanted)) as copier:
        leaves: dict[str, Leaf] = {path: leaf_of(shape, copier) for path, shape in shapes.items()}
        for match in found:
            view = weights.view(match.name)
            for piece in match.entry.pieces:
                leaves[piece.path].store(piece, piece_of(view, match.entry, piece))
            del view
            weights.release(match.name)
            done += weights[match.name].data_bytes
            on_progress(done, total)
        arrays = [leaves.pop(path).array() for path in shapes]
    return jax.tree_util.tree_unflatten(structure, arrays)


def _is_quantized(leaf: object) -> bool:
    return isinstance(leaf, Quantized)


def piece_of(tensor: NDArray[Any], entry: Entry, piece: Piece) -> NDArray[Any]:
    """The piece's part of the tensor, a view with one dimension per letter."""
    part = (*(slice(None),) * entry.along, slice(piece.start, piece.start + piece.shape[entry.along]))
    return tensor[part].reshape(piece.split)
