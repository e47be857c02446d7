"""Reading of a checkpoint's weights onto the devices, one tensor at a time from the mapped files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.safetensors import Weights, numpy_dtype
from forerun.models.keys import Entry, Piece, Tensor, path_text
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import map_weights
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.nn.weights.quantized import Quantized
from forerun.weights_io.leaves import Copier, WeightLeaf, leaf_of
from forerun.weights_io.match import Stacked, matches
from forerun.weights_io.scales import scale_entries


def read_params(
    weights: Weights,
    table: Iterable[Tensor],
    model: Stacked,
    wanted: Tree,
    scales: Weights | None = None,
) -> Tree:
    """Return the model's parameters on the devices.

    Host memory beyond the arrays is bounded by the largest tensor. With several hosts, all of them make the same call,
    and each fills the shards on its devices.

    Args:
        weights: The tensors of the checkpoint.
        table: The tensor table of the family.
        model: The model.
        wanted: A tree of `jax.ShapeDtypeStruct` with shardings. A `Quantized` in place of a dense weight makes the
            devices quantize its tensors layer by layer.
        scales: The tensors of scales, for fake-quantized weights in `wanted` that have fixed scales.

    Raises:
        UserError: The tensors are not those of the model, or scales are missing or not representable in bfloat16.
    """
    table = tuple(table)
    found = matches(weights, table, model)
    flat, structure = jax.tree_util.tree_flatten_with_path(wanted, is_leaf=_is_quantized)
    shapes = {path_text(path) + (".value" if _is_quantized(leaf) else ""): leaf for path, leaf in flat}
    with Copier(leaf.sharding for leaf in jax.tree.leaves(wanted)) as copier:
        leaves: dict[str, WeightLeaf] = {path: leaf_of(shape, copier) for path, shape in shapes.items()}
        for match in found:
            view = weights.view(match.name)
            for piece in match.entry.pieces:
                leaves[piece.path].store(piece, piece_of(view, match.entry, piece))
            del view
            weights.release(match.name)
        for source, entry in _scales(scales, wanted, table, model):
            for piece in entry.pieces:
                leaves[f"{piece.path}.scale"].store(piece, piece_of(source, entry, piece))
        arrays = [leaves.pop(path).array() for path in shapes]
    return jax.tree_util.tree_unflatten(structure, arrays)


def _scales(
    scales: Weights | None, wanted: Tree, table: Iterable[Tensor], model: Stacked
) -> Iterator[tuple[NDArray[Any], Entry]]:
    """Yield the tensors of the fixed scales in `wanted`, each with its entry."""
    given = map_weights(lambda one: one if isinstance(one, FakeQuantized) and one.scale is not None else None, wanted)
    for name, entry in scale_entries(given, table, model, as_integers=False).items():
        if scales is None or name not in scales or scales[name].shape != entry.shape:
            raise UserError(
                "E-WEIGHTS-005",
                f"{name} is missing, or has another shape than {list(entry.shape)}",
                why="the folder says that the matrix was rounded, so it must have the scales",
                fix="export the run again",
            )
        source = scales.view(name)
        if not np.array_equal(source, source.astype(numpy_dtype("BF16")).astype(source.dtype)):
            raise UserError(
                "E-WEIGHTS-006",
                f"{name} has scales that are not bfloat16 numbers",
                why="forerun trains with scales in bfloat16, so it could not keep these",
                fix="change qat.group or qat.weights; forerun then rounds the matrices again",
            )
        yield source, entry
        del source
        scales.release(name)


def _is_quantized(leaf: object) -> bool:
    return isinstance(leaf, Quantized)


def piece_of(tensor: NDArray[Any], entry: Entry, piece: Piece) -> NDArray[Any]:
    """Return the piece's part of the tensor, as a view with one dimension per letter."""
    return tensor[piece.slices(entry.along)].reshape(piece.split)


def read_tree(weights: Weights, wanted: Tree, where: str) -> Tree:
    """Return the parameters of a custom model on the devices, which `write_tree` has written.

    Args:
        weights: The tensors.
        wanted: A tree of `jax.ShapeDtypeStruct` with shardings.
        where: The folder, for errors.

    Raises:
        UserError: The tensors are not those of `wanted`.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(wanted)
    shapes = {path_text(path): leaf for path, leaf in flat}
    stored = {name: info.shape for name, info in weights.items()}
    differing = [name for name in {**shapes, **stored} if name not in shapes or stored.get(name) != shapes[name].shape]
    if differing:
        name = differing[0]
        needs = f"{list(shapes[name].shape)}" if name in shapes else "nothing"
        has = f"{list(stored[name])}" if name in stored else "nothing"
        raise UserError(
            "E-MODEL-031",
            f"{len(differing)} weights in {where} are not those of the model class",
            why=f"{name}: the class has {needs}, and the files have {has}",
            fix="use the code that the model was trained with; the folder code/ of the export has a copy",
        )
    return jax.tree_util.tree_unflatten(structure, [_placed(weights, name, leaf) for name, leaf in shapes.items()])


def _placed(weights: Weights, name: str, like: Any) -> jax.Array:
    view = weights.view(name)
    placed = jax.make_array_from_callback(like.shape, like.sharding, lambda part: view[part].astype(like.dtype))
    placed.block_until_ready()  # so that the pages of the file are no longer needed
    weights.release(name)
    return placed
