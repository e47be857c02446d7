"""Weights of a custom model in safetensors files. A tensor has the path of its parameter in `specs()` as its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.safetensors import Weights, numpy_dtype
from forerun.models.keys import path_text
from forerun.nn.spec import Tree
from forerun.weights_io.shards import Planned, Shards, shards_of
from forerun.weights_io.write import SHARD_BYTES, require_float16, tensor_dtype


def write_tree(folder: Path, params: Tree, dtype: str, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write all parameters in `dtype`, one tensor at a time, and return the paths of the files."""
    leaves = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    planned = [Planned(name, tensor_dtype(dtype, name), leaf.shape) for name, leaf in leaves.items()]

    def value_of(tensor: Planned) -> NDArray[Any]:
        value = np.asarray(leaves[tensor.name]).astype(numpy_dtype(tensor.dtype), order="C")
        require_float16(tensor, value)
        return value

    with Shards(folder, shards_of(planned, shard_bytes)) as shards:
        shards.write(value_of)
        return shards.finish()


def read_tree(weights: Weights, wanted: Tree, where: str) -> Tree:
    """Return the parameters on the devices.

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
