"""The tables of tensors: every element of every leaf lies in exactly one place of a checkpoint, for any table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.keys import Entry, Piece, Stack, Tensor, entries, fused, tensor
from forerun.nn.spec import Fill, ParamSpec


def leaf(axes: str, sizes: dict[str, int]) -> ParamSpec:
    return ParamSpec(tuple(sizes[letter] for letter in axes), axes, Fill(0.0))


def place(entry: Entry, piece: Piece, value: np.ndarray, whole: np.ndarray) -> None:
    """Write a leaf's values into the tensor, by what the piece says."""
    start = [0] * whole.ndim
    start[entry.along] = piece.start
    part = tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))
    whole[part] = value.transpose(np.argsort(piece.order)).reshape(piece.shape)


def take(entry: Entry, piece: Piece, whole: np.ndarray) -> np.ndarray:
    part = [slice(None)] * whole.ndim
    part[entry.along] = slice(piece.start, piece.start + piece.shape[entry.along])
    return whole[tuple(part)].reshape(piece.split).transpose(piece.order)


def test_a_matrix_of_heads_by_hand() -> None:
    """Row h * D + d of the tensor, column e, is element [e, h, d] of the leaf."""
    sizes = {"L": 2, "E": 5, "H": 3, "D": 4}
    found = entries(
        [tensor("x.{}.q", "blocks.q", "(HD) E")], {"blocks": {"q": leaf("LEHD", sizes)}}, [Stack("blocks", (0, 1))]
    )
    assert [(entry.name, entry.shape) for entry in found] == [("x.0.q", (12, 5)), ("x.1.q", (12, 5))]
    (piece,) = found[1].pieces
    assert (piece.path, piece.layer, piece.split) == ("blocks.q", 1, (3, 4, 5))
    whole = np.arange(60).reshape(12, 5)
    value = take(found[1], piece, whole)
    assert value.shape == (5, 3, 4)
    assert all(value[e, h, d] == whole[h * 4 + d, e] for e in range(5) for h in range(3) for d in range(4))


def test_parts_side_by_side_by_hand() -> None:
    """GPT-2 keeps q and k next to each other along the columns."""
    specs = {"q": leaf("EH", {"E": 3, "H": 2}), "k": leaf("EH", {"E": 3, "H": 2})}
    (entry,) = entries([fused("c", ("q", "E H"), ("k", "E H"), along=1)], specs, [])
    assert entry.shape == (3, 4)
    whole = np.arange(12).reshape(3, 4)
    assert take(entry, entry.pieces[1], whole).tolist() == [[2, 3], [6, 7], [10, 11]]


def test_layers_of_the_tail_go_on_counting() -> None:
    specs = {"blocks": {"n": leaf("LE", {"L": 2, "E": 3})}, "tail": {"n": leaf("LE", {"L": 1, "E": 3})}}
    found = entries([tensor("h.{}.n", "blocks.n", "E")], specs, [Stack("blocks", (0, 1)), Stack("tail", (2,))])
    assert [(e.name, e.pieces[0].path, e.pieces[0].layer) for e in found] == [
        ("h.0.n", "blocks.n", 0),
        ("h.1.n", "blocks.n", 1),
        ("h.2.n", "tail.n", 0),
    ]


def test_tensors_of_leaves_that_the_model_lacks_drop_out() -> None:
    table = [tensor("a", "a", "E"), tensor("head", "head", "E")]
    assert [entry.name for entry in entries(table, {"a": leaf("E", {"E": 2})}, [])] == ["a"]


def test_a_leaf_without_a_tensor_is_told() -> None:
    specs = {"a": leaf("E", {"E": 2}), "b": leaf("E", {"E": 2})}
    with pytest.raises(ValueError, match="no tensor of the table holds b"):
        entries([tensor("a", "a", "E")], specs, [])


def test_a_form_of_other_letters_is_told() -> None:
    with pytest.raises(ValueError, match="does not name the dimensions EF of a"):
        entries([tensor("a", "a", "E H")], {"a": leaf("EF", {"E": 2, "F": 2})}, [])


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any], list[Stack]]:
    """Random leaves, each in a tensor of its own or side by side with others, its letters in any order and groups."""
    sizes = {letter: draw(st.integers(1, 3)) for letter in "EFHDV"} | {"L": draw(st.integers(1, 3))}
    stacks = [Stack("blocks", tuple(range(sizes["L"])))]
    table: list[Tensor] = []
    specs: dict[str, Any] = {"blocks": {}}
    for number in range(draw(st.integers(1, 4))):
        stacked = draw(st.booleans())
        letters = draw(st.permutations(draw(st.lists(st.sampled_from("EFHDV"), min_size=1, max_size=4, unique=True))))
        cuts = [draw(st.booleans()) for _ in letters[1:]]
        groups = [letters[0]]
        for letter, cut in zip(letters[1:], cuts, strict=True):
            groups = [*groups, letter] if cut else [*groups[:-1], groups[-1] + letter]
        form = " ".join(f"({group})" for group in groups)
        parts = []
        for part in range(draw(st.integers(1, 3))):
            axes = "".join(draw(st.permutations(letters)))
            name = f"leaf{number}_{part}"
            where = specs["blocks"] if stacked else specs
            where[name] = leaf(("L" if stacked else "") + axes, sizes)
            parts.append((f"blocks.{name}" if stacked else name, form))
        along = draw(st.integers(0, len(groups) - 1))
        table.append(fused(f"t{number}.{{}}" if stacked else f"t{number}", *parts, along=along))
    return table, specs, stacks


@settings(max_examples=60, deadline=None)
@given(tables())
def test_any_table_is_a_bijection(made: tuple[list[Tensor], dict[str, Any], list[Stack]]) -> None:
    """Number all elements of all leaves: tensors hold each number once, and reading them gives the leaves back."""
    table, specs, stacks = made
    flat = {name: s for name, s in specs.items() if name != "blocks"}
    flat |= {f"blocks.{name}": s for name, s in specs["blocks"].items()}
    values, total = {}, 0
    for name, s in flat.items():
        size = math.prod(s.shape)
        values[name] = np.arange(total, total + size).reshape(s.shape)
        total += size

    found = entries(table, specs, stacks)
    assert len({entry.name for entry in found}) == len(found)
    checkpoint = {}
    for entry in found:
        checkpoint[entry.name] = np.full(entry.shape, -1)
        for piece in entry.pieces:
            value = values[piece.path] if piece.layer is None else values[piece.path][piece.layer]
            place(entry, piece, value, checkpoint[entry.name])
    assert sorted(np.concatenate([whole.reshape(-1) for whole in checkpoint.values()])) == list(range(total))

    for entry in found:
        for piece in entry.pieces:
            value = values[piece.path] if piece.layer is None else values[piece.path][piece.layer]
            assert np.array_equal(take(entry, piece, checkpoint[entry.name]), value)
