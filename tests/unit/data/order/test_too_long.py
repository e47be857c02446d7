"""The policy for items that are longer than a row: values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.data.order.packing import apply_policy, pack, refuse_too_long, resolve_policy
from forerun.errors import UserError

LENGTHS = np.array([0, 7, 8, 9, 20])


@pytest.mark.parametrize(
    ("policy", "cut", "kept"),
    [
        ("split", [0, 0, 0, 0, 0], [0, 7, 8, 9, 20]),
        ("keep_start", [0, 0, 0, 0, 0], [0, 7, 8, 8, 8]),
        ("keep_end", [0, 0, 0, 1, 12], [0, 7, 8, 8, 8]),
        ("drop", [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]),
    ],
)
def test_documents_keep_what_the_policy_says(policy: Any, cut: list[int], kept: list[int]) -> None:
    found = apply_policy(LENGTHS, 8, policy)
    assert [one.tolist() for one in found] == [cut, kept]


def test_both_sides_of_a_pair_lose_the_same_tokens_or_the_pair_is_dropped() -> None:
    lengths, removable = np.array([8, 9, 9, 20, 20]), np.array([-1, 1, 0, 6, 5])
    cut, kept = apply_policy(lengths, 8, "keep_end", sides=2, removable=removable)
    assert cut.tolist() == [0, 1, 0, 6, 0]
    assert kept.tolist() == [8, 7, 0, 8, 0]


def test_stop_counts_all_chunks() -> None:
    refuse_too_long([LENGTHS, LENGTHS], 20, pairs=False)
    with pytest.raises(UserError) as documents:
        refuse_too_long([LENGTHS, LENGTHS], 8, pairs=False)
    assert documents.value.code == "E-DATA-020"
    assert "4 of 10" in documents.value.what
    assert "sequence=20" in documents.value.fix
    with pytest.raises(UserError) as pairs:
        refuse_too_long([LENGTHS], 9, pairs=True)
    assert pairs.value.code == "E-DATA-018"
    assert "1 of 5" in pairs.value.what


def test_auto_depends_on_what_is_packed_and_a_pair_is_never_split() -> None:
    assert resolve_policy("auto", pairs=False) == "split"
    assert resolve_policy("auto", pairs=True) == "keep_end"
    assert resolve_policy("drop", pairs=True) == "drop"
    for setting in ("split", "keep_start"):
        with raises_error("E-DATA-008"):
            resolve_policy(setting, pairs=True)  # type: ignore[arg-type]


def test_full_pieces_come_first_in_their_window() -> None:
    items, row_starts = pack(np.array([3, 17, 0, 5, 8, 2, 6]), 8, 5)
    # Window 0: item 1 fills two rows, item 4 one; then 5 + 3 in one row, and the last position of item 1.
    # Window 1: 6 + 2.
    assert items.tolist() == [1, 1, 4, 3, 0, 1, 6, 5]
    assert row_starts.tolist() == [0, 1, 2, 3, 5, 6]
