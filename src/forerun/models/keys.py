"""Names and layouts of a checkpoint's tensors, as tables that serve both reading and writing.

A `Tensor` names the leaf that it contains, and gives the letters of its dimensions: `"(HD) E"` is a matrix whose rows
are H times D, while the leaf may be `EHD`. Reading and writing are the same reshape and transpose in both directions,
so they cannot disagree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.models.layer_kinds import SECTIONS, SHAPES

if TYPE_CHECKING:
    from forerun.nn.spec import ParamSpec, Tree

ONE = "1"  # in a form: a dimension of size 1, which the leaf does not have
LAYER = "{}"  # in a tensor's name: the number of its layer
EXPERT = "{expert}"  # in a tensor's name: the number of its expert
_KEYS_AND_VALUES = {f"blocks.{name}" for name in ("key", "value", "key_bias", "value_bias", "key_norm")}


@dataclass(frozen=True)
class Stack:
    """Layers that are stacked in one part of the parameters."""

    name: str  # path of the part: "blocks", "tail" or "blocks.full"
    numbers: tuple[int, ...]  # the number of each of its layers in the model

    @property
    def layers(self) -> int:
        return len(self.numbers)

    def path(self, leaf: str) -> str:
        """Return the path in this stack of a leaf in a table: `blocks.query` is `tail.full.query`."""
        return leaf.replace("blocks", self.name, 1)


def table_path(path: str) -> str:
    """Return the path in a table of a path in the parameters: `tail.full.query` is `blocks.query`."""
    section, _, inner = path.partition(".")
    if section not in SECTIONS or not inner:
        return path
    shape, _, rest = inner.partition(".")
    return f"blocks.{rest if shape in SHAPES and rest else inner}"


@dataclass(frozen=True)
class Part:
    """The leaf that is stored in a tensor or in a part of it.

    `form` has the letters of the tensor's dimensions, with the letters of one flattened dimension in parentheses.
    """

    leaf: str
    form: str


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. Several parts are concatenated along dimension `along`, or interleaved there."""

    name: str
    parts: tuple[Part, ...]
    along: int = 0
    interleaved: bool = False  # the first index of each part, then the second one of each


def tensor(name: str, leaf: str, form: str) -> Tensor:
    """Return a tensor that contains one leaf."""
    return Tensor(name, (Part(leaf, form),))


def fused(name: str, *parts: tuple[str, str], along: int = 0) -> Tensor:
    """Return a tensor that contains several leaves, each given as (leaf, form)."""
    return Tensor(name, tuple(Part(leaf, form) for leaf, form in parts), along)


def interleaved(name: str, *parts: tuple[str, str], along: int) -> Tensor:
    """Return a tensor whose indices along a dimension belong to several leaves in turn, each given as (leaf, form)."""
    return replace(fused(name, *parts, along=along), interleaved=True)


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that contains one leaf, or one layer of it."""

    path: str  # of the leaf in the parameters, "blocks.query.value"
    layer: int | None  # index in that leaf; None if it has no layer dimension
    start: int  # offset along the tensor's dimension `along`
    shape: tuple[int, ...]  # of the slice in the tensor
    split: tuple[int, ...]  # shape of the slice with one dimension per letter
    order: tuple[int, ...]  # transposes that into the leaf's order of dimensions
    expert: int | None = None  # index in that layer; None if the tensor has all experts, or the leaf has none
    step: int = 1  # distance of its indices along `along`: the number of interleaved parts

    @property
    def lead(self) -> tuple[int, ...]:
        """The index of the piece in the first dimensions of its leaf."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    def slices(self, along: int) -> tuple[slice, ...]:
        """Return the index of the piece in its tensor."""
        end = self.start + self.step * (self.shape[along] - 1) + 1
        return (*(slice(None),) * along, slice(self.start, end, self.step))


@dataclass(frozen=True)
class Entry:
    """A tensor of a particular model: its full name with the layer number, its shape and its pieces."""

    name: str
    shape: tuple[int, ...]
    along: int
    pieces: tuple[Piece, ...]


def entries(table: Iterable[Tensor], specs: Tree, stacks: Sequence[Stack]) -> list[Entry]:
    """Return every tensor of a model's checkpoint, in the order of the table, with ascending layers.

    Tensors of leaves that the model or a stack does not have (a bias, an untied head) are omitted.

    Args:
        table: The tensors of the family, with {} for the layer in their names.
        specs: The parameters of the model, a tree of ParamSpec.
        stacks: The stacked layers of the model.

    Raises:
        ValueError: The table has no tensor for a leaf, or a form does not match its leaf.
    """
    leaves = leaves_of(specs)
    found: list[Entry] = []
    for one in table:
        if LAYER not in one.name:
            if all(_path(part.leaf, leaves) for part in one.parts):
                found.append(_entry(one, one.name, leaves, None))
            continue
        layers: dict[int, list[Entry]] = {}
        for stack in stacks:
            parts = tuple(Part(stack.path(part.leaf), part.form) for part in one.parts)
            if not all(_path(part.leaf, leaves) for part in parts):
                continue
            for n, number in enumerate(stack.numbers):
                layers[number] = _layer_entries(replace(one, parts=parts), number, leaves, n)
        found += [entry for number in sorted(layers) for entry in layers[number]]
    held = {piece.path for entry in found for piece in entry.pieces}
    if missing := sorted(set(leaves) - held):
        raise ValueError(f"no tensor of the table holds {', '.join(missing)}")
    return found


def unused_names(table: Iterable[Tensor], specs: Tree, stacks: Sequence[Stack]) -> set[str]:
    """Return the names of tensors that files may have although the model has no parameters for them.

    These are keys and values of layers that attend to those of earlier layers. Published files of Gemma 4 E2B and E4B
    have them, and no code reads them.
    """
    leaves = leaves_of(specs)
    sharing = [s for s in stacks if _path(s.path("blocks.query"), leaves) and not _path(s.path("blocks.key"), leaves)]
    return {
        one.name.replace(LAYER, str(number))
        for one in table
        if {part.leaf for part in one.parts} <= _KEYS_AND_VALUES
        for stack in sharing
        for number in stack.numbers
    }


def leaves_of(specs: Tree) -> dict[str, ParamSpec]:
    """Return the specs by path, for example `blocks.query.value`."""
    import jax

    from forerun.nn.spec import is_spec

    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return {path_text(path): leaf for path, leaf in flat}


def path_text(path: Any) -> str:
    """Return a path of a JAX tree as text, with dots between its parts."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


def _path(leaf: str, leaves: Mapping[str, Any]) -> str | None:
    """Return the path of a table's leaf, or None. `blocks.query` may mean the leaf `blocks.query.value`."""
    return next((path for path in (leaf, f"{leaf}.value") if path in leaves), None)


def _layer_entries(one: Tensor, number: int, leaves: Mapping[str, ParamSpec], layer: int) -> list[Entry]:
    """Return the tensors of one layer: one, or one per expert."""
    name = one.name.replace(LAYER, str(number))
    if EXPERT not in name:
        return [_entry(one, name, leaves, layer)]
    path = _path(one.parts[0].leaf, leaves)
    assert path is not None
    experts = leaves[path].shape[1]
    first = _entry(one, name, leaves, layer, 0)  # the others differ only in their number
    return [
        Entry(
            name.replace(EXPERT, str(expert)),
            first.shape,
            first.along,
            tuple(replace(piece, expert=expert) for piece in first.pieces),
        )
        for expert in range(experts)
    ]


def _entry(
    one: Tensor, name: str, leaves: Mapping[str, ParamSpec], layer: int | None, expert: int | None = None
) -> Entry:
    pieces, start, total = [], 0, 0
    for part in one.parts:
        path = _path(part.leaf, leaves)
        assert path is not None
        spec = leaves[path]
        stacked = spec.axes.startswith("L")
        lead = stacked + (expert is not None)
        letters = spec.axes[lead:]
        sizes = dict(zip(letters, spec.shape[lead:], strict=True))
        named = [group if group != ONE else "" for group in groups(part.form)]
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
                expert,
                len(one.parts) if one.interleaved else 1,
            )
        )
        start += 1 if one.interleaved else shape[one.along]
        total += shape[one.along]
    first = pieces[0].shape
    whole = (*first[: one.along], total, *first[one.along + 1 :])
    return Entry(name, whole, one.along, tuple(pieces))


def groups(form: str) -> list[str]:
    """Return the letters of each dimension of a form: `"(HD) E"` gives ["HD", "E"]."""
    return [inside or single for inside, single in re.findall(r"\((\w+)\)|(\w)", form)]
