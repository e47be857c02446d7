"""The names and layouts of a checkpoint's tensors, as data: one table serves reading and writing alike.

A `Tensor` says which leaf it holds and how its dimensions read in the leaf's letters: `"(HD) E"` is a matrix whose rows
are heads and head, while the leaf may be `EHD`. Both ways are a reshape and a transpose, so they cannot disagree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.nn.spec import ParamSpec, Tree

LAYER = "{}"  # in a tensor's name: the number of its layer


@dataclass(frozen=True)
class Stack:
    """`layers` of them from number `first` on, under the name of their part of the parameters."""

    name: str
    first: int
    layers: int


@dataclass(frozen=True)
class Part:
    """A leaf, and the letters of the tensor's dimensions (those of one dimension in parentheses)."""

    leaf: str
    form: str


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. Several parts lie one after the other along dimension `along`."""

    name: str
    parts: tuple[Part, ...]
    along: int = 0


def tensor(name: str, leaf: str, form: str) -> Tensor:
    return Tensor(name, (Part(leaf, form),))


def fused(name: str, *parts: tuple[str, str], along: int = 0) -> Tensor:
    return Tensor(name, tuple(Part(leaf, form) for leaf, form in parts), along)


@dataclass(frozen=True)
class Piece:
    """What one tensor holds of one leaf: a layer of it or all of it, in the tensor's order of dimensions.

    `split` is the tensor's slice with one dimension per letter; `order` transposes that into the leaf's order.
    """

    path: str  # of the leaf in the parameters, "blocks.query.value"
    layer: int | None  # in that leaf; None if it has no layers
    start: int  # along the tensor's dimension `along`
    shape: tuple[int, ...]  # of the slice, as it lies in the tensor
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """The transpose from the leaf's order into the tensor's."""
        return tuple(self.order.index(n) for n in range(len(self.order)))


@dataclass(frozen=True)
class Entry:
    """A tensor with its layer filled in."""

    name: str
    shape: tuple[int, ...]
    along: int
    pieces: tuple[Piece, ...]


def entries(table: Iterable[Tensor], specs: Tree, stacks: Sequence[Stack]) -> list[Entry]:
    """Every tensor of a model's checkpoint, in the order of the table, layers ascending.

    Names of leaves that the model does not have (a bias, an untied head) drop out; a leaf that no tensor
    holds is a mistake of the table.
    """
    leaves = leaves_of(specs)
    found: list[Entry] = []
    for one in table:
        if not all(_path(part.leaf, leaves) for part in one.parts):
            continue
        if LAYER not in one.name:
            found.append(_entry(one, one.name, leaves, None))
            continue
        for stack in stacks:
            for n in range(stack.layers):
                moved = Tensor(
                    one.name.replace(LAYER, str(stack.first + n)),
                    tuple(Part(part.leaf.replace("blocks", stack.name, 1), part.form) for part in one.parts),
                    one.along,
                )
                found.append(_entry(moved, moved.name, leaves, n))
    held = {piece.path for entry in found for piece in entry.pieces}
    if missing := sorted(set(leaves) - held):
        raise ValueError(f"no tensor of the table holds {', '.join(missing)}")
    return found


def leaves_of(specs: Tree) -> dict[str, ParamSpec]:
    """Path -> spec, paths as `blocks.query.value`."""
    import jax

    from forerun.nn.spec import is_spec

    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return {path_text(path): leaf for path, leaf in flat}


def path_text(path: Any) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


def _path(leaf: str, leaves: Mapping[str, Any]) -> str | None:
    """A table says `blocks.query`; the leaf may be `blocks.query.value`."""
    return next((path for path in (leaf, f"{leaf}.value") if path in leaves), None)


def _entry(one: Tensor, name: str, leaves: Mapping[str, ParamSpec], layer: int | None) -> Entry:
    pieces, start = [], 0
    for part in one.parts:
        path = _path(part.leaf, leaves)
        assert path is not None
        spec = leaves[path]
        stacked = spec.axes.startswith("L")
        letters = spec.axes[1:] if stacked else spec.axes
        sizes = dict(zip(letters, spec.shape[1:] if stacked else spec.shape, strict=True))
        named = groups(part.form)
        flat = "".join(named)
        if sorted(flat) != sorted(letters):
            raise ValueError(f"{name}: {part.form} does not name the dimensions {letters} of {path}")
        shape = tuple(math.prod(sizes[letter] for letter in group) for group in named)
        pieces.append(
            Piece(
                path,
                layer if stacked else None,
                start,
                shape,
                tuple(sizes[letter] for letter in flat),
                tuple(flat.index(letter) for letter in letters),
            )
        )
        start += shape[one.along]
    first = pieces[0].shape
    whole = (*first[: one.along], start, *first[one.along + 1 :])
    return Entry(name, whole, one.along, tuple(pieces))


def groups(form: str) -> list[str]:
    """`"(HD) E"` -> ["HD", "E"]."""
    return [inside or single for inside, single in re.findall(r"\((\w+)\)|(\w)", form)]
