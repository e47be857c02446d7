"""Names, shapes and layouts of the tensors that contain the scales of rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from forerun.errors import UserError
from forerun.models.keys import Entry, Part, Tensor, entries, groups, leaves_of, path_text, table_path
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.fakequant import FakeQuantized, scale_spec
from forerun.weights_io.match import Stacked

SUFFIX = ".weight_scale"


def rounded_weights(params: Tree) -> dict[str, FakeQuantized[Any]]:
    """Return the fake-quantized weights by path."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {path_text(path): leaf for path, leaf in flat if isinstance(leaf, FakeQuantized)}


def scale_entries(
    params: Tree, table: Iterable[Tensor], model: Stacked, *, as_integers: bool = True
) -> dict[str, Entry]:
    """Return the entries of the scale tensors by name. The path of a piece is that of its weight.

    Args:
        params: The parameters, with fake-quantized weights.
        table: The tensor table of the family.
        model: The model.
        as_integers: Whether the weights are written as integers. If false, tensors that are only partly rounded are
            omitted.

    Raises:
        UserError: With `as_integers`, a tensor is only partly rounded, or it is not the matrix of a linear layer.
    """
    weights = rounded_weights(params)
    found = _scale_table(tuple(table), set(weights), model, as_integers)
    held = {path for one in found for path in _paths(one, model)}
    specs = _scale_specs({path: one for path, one in weights.items() if path in held}, model)
    return {entry.name: entry for entry in entries(found, specs, model.stacks)}


def are_multiples(params: Tree) -> bool:
    """Return whether all weights with fixed scales are codes times scales, rounded to float32, bfloat16 or float16."""
    return _all_given(_is_multiple, params)


def can_be_computed(params: Tree) -> bool:
    """Return whether `FakeQuantized.computed` keeps all codes and scales of the weights with fixed scales."""
    return _all_given(_is_kept, params)


def _all_given(test: Callable[[FakeQuantized[jax.Array]], jax.Array], params: Tree) -> bool:
    given = {path: one for path, one in rounded_weights(params).items() if one.scale is not None}
    if not given:
        return True
    with jax.set_mesh(jax.tree.leaves(given)[0].sharding.mesh):
        return bool(jax.jit(lambda given: jnp.all(jnp.stack([test(one) for one in given.values()])))(given))


def _is_kept(weight: FakeQuantized[jax.Array]) -> jax.Array:
    pairs = zip(weight.codes(), weight.computed().codes(), strict=True)
    return jnp.all(jnp.stack([jnp.array_equal(before, after) for before, after in pairs]))


def _is_multiple(weight: FakeQuantized[jax.Array]) -> jax.Array:
    exact = weight.matrix("", jnp.float32)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    same = [jnp.all(weight.value == exact.astype(dtype).astype(weight.value.dtype)) for dtype in dtypes]
    return jnp.any(jnp.stack(same))


def _scale_table(table: Iterable[Tensor], rounded: set[str], model: Stacked, as_integers: bool) -> list[Tensor]:
    """Return the tensors of the scales: those of the weights, with the letter G in place of the inputs."""
    leaves, found = leaves_of(model.specs()), []
    for one in table:
        paths = [path for path in _paths(one, model) if f"{path}.value" in leaves]
        if not rounded & set(paths):
            continue
        others = sorted(set(paths) - rounded)
        if others and not as_integers:
            continue
        # The letters of a leaf are the same in all stacks that have it.
        letters = {table_path(path): leaves[f"{path}.value"] for path in paths}
        parts = [Part(part.leaf, _scale_form(one, part, letters[part.leaf], as_integers)) for part in one.parts]
        if others:
            raise UserError(
                "E-WEIGHTS-007",
                f"{one.name} cannot be written as integers",
                why=f"not all parts of it are rounded: {', '.join(others)}",
                fix="export with --dense; for the next run, name all of them in qat.targets",
            )
        found.append(Tensor(one.name.removesuffix(".weight") + SUFFIX, tuple(parts), one.along))
    return found


def _paths(one: Tensor, model: Stacked) -> list[str]:
    return [stack.path(part.leaf) for part in one.parts for stack in model.stacks]


def _scale_form(one: Tensor, part: Part, spec: ParamSpec, as_integers: bool) -> str:
    letters = spec.axes.removeprefix("L")
    ins, outs = letters[: spec.inputs], letters[spec.inputs :]
    form = groups(part.form)
    if form == [outs, ins] and one.along == 0:
        return f"({outs}) G"
    if form == [ins, outs] and not as_integers:
        return f"G ({outs})"
    raise UserError(
        "E-WEIGHTS-008",
        f"{one.name} cannot be written as integers",
        why="in this family the tensor is not the matrix of a linear layer, and no runtime reads its integers",
        fix="export with --dense, which writes the rounded weights as floats",
    )


def _scale_specs(weights: dict[str, FakeQuantized[Any]], model: Stacked) -> dict[str, Any]:
    """Return the specs of the scales as a tree that `entries` can read: blocks -> query -> spec."""
    leaves = leaves_of(model.specs())
    tree: dict[str, Any] = {}
    for path, one in weights.items():
        inner = tree
        *parents, last = path.split(".")
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = scale_spec(leaves[f"{path}.value"], one.group)
    return tree
