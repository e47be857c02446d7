from __future__ import annotations

import numpy as np
import pytest

from forerun.data.packing import Rows
from forerun.data.stream import Stream, token_stream
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError

FIELDS = ("tokens", "targets", "weights", "segments", "positions")


def rows_of(lengths: list[int], sequence: int) -> Rows:
    """Documents of these lengths (end included) with tokens 1, 2, 3 ... so that each is known by its value."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return Rows(Stream(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)), sequence)


def packed_plainly(lengths: list[int], S: int) -> dict[str, np.ndarray]:
    """The definition, one position at a time."""
    owner = [d for d, length in enumerate(lengths) for _ in range(length)]
    n = len(owner)
    out: dict[str, list[list[int]]] = {name: [] for name in FIELDS}
    for begin in range(0, n - 1, S):
        row: dict[str, list[int]] = {name: [] for name in FIELDS}
        segment, position = 0, 0
        for i in range(begin, begin + S):
            if i >= n:
                for name in FIELDS:
                    row[name].append(0)
                continue
            if i == begin or owner[i] != owner[i - 1]:
                segment, position = segment + 1, 0
            row["tokens"].append(i + 1)
            row["targets"].append(i + 2 if i + 1 < n else 0)
            row["weights"].append(int(i + 1 < n and owner[i] == owner[i + 1]))
            row["segments"].append(segment)
            row["positions"].append(position)
            position += 1
        for name in FIELDS:
            out[name].append(row[name])
    return {name: np.array(out[name]) for name in FIELDS}


def test_two_documents_by_hand() -> None:
    taken = Rows(token_stream(["abc", "d"], ByteTokenizer()), 4).take([0, 1])
    # stream: a b c END d END
    assert taken["tokens"].tolist() == [[97, 98, 99, 256], [100, 256, 0, 0]]
    assert taken["targets"].tolist() == [[98, 99, 256, 100], [256, 0, 0, 0]]
    assert taken["weights"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert taken["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert taken["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


@pytest.mark.parametrize("sequence", [1, 2, 3, 7, 16, 200])
def test_rows_equal_the_definition(sequence: int) -> None:
    rng = np.random.default_rng(sequence)
    for count in (1, 2, 5, 20):
        lengths = rng.integers(2, 12, count).tolist()
        rows = rows_of(lengths, sequence)
        expected = packed_plainly(lengths, sequence)
        order = rng.permutation(len(rows))
        taken = rows.take(order)
        assert tuple(taken) == FIELDS
        for name in FIELDS:
            np.testing.assert_array_equal(taken[name], expected[name][order], err_msg=f"{name} {lengths}")
            assert taken[name].dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("sequence", [1, 3, 8])
def test_every_token_but_a_documents_first_is_a_target_exactly_once(sequence: int) -> None:
    lengths = [2, 9, 3, 25, 2]
    taken = rows_of(lengths, sequence).take(np.arange(-(-(sum(lengths) - 1) // sequence)))
    counted = sorted(taken["targets"][taken["weights"] > 0].tolist())
    firsts = set(np.concatenate([[1], np.cumsum(lengths)[:-1] + 1]).tolist())
    assert counted == [t for t in range(1, sum(lengths) + 1) if t not in firsts]


@pytest.mark.parametrize(("tokens", "count", "padding"), [(8, 2, 0.0), (9, 2, 0.0), (10, 3, 2 / 12), (5, 1, 0.0)])
def test_number_of_rows_and_padding(tokens: int, count: int, padding: float) -> None:
    rows = rows_of([tokens], 4)
    assert (len(rows), rows.tokens, rows.documents) == (count, tokens, 1)
    assert rows.padding_share == pytest.approx(padding)
    assert (rows.take(np.arange(count))["segments"] == 0).mean() == pytest.approx(padding)


def test_a_row_that_is_not_there_is_not_made_up() -> None:
    rows = rows_of([10], 4)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            rows.take([0, index])


def test_one_token_is_too_little() -> None:
    with pytest.raises(UserError, match="too little text"):
        rows_of([1], 4)
