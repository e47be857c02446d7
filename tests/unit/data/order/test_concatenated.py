from __future__ import annotations

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.data.documents import InMemory, in_memory
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.rows import FIELDS


def rows_of(lengths: list[int], sequence: int, learned: np.ndarray | None = None) -> Concatenated:
    """Documents of these lengths (end included) with tokens 1, 2, 3 ... so that each is known by its value."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return Concatenated(InMemory(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), learned), sequence)


def packed_plainly(lengths: list[int], S: int, learned: np.ndarray | None = None) -> dict[str, np.ndarray]:
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
            same = i + 1 < n and owner[i] == owner[i + 1]
            row["tokens"].append(i + 1)
            row["targets"].append(i + 2 if i + 1 < n else 0)
            row["weights"].append(int(same and (learned is None or bool(learned[i + 1]))))
            row["segments"].append(segment)
            row["positions"].append(position)
            position += 1
        for name in FIELDS:
            out[name].append(row[name])
    return {name: np.array(out[name]) for name in FIELDS}


def test_two_documents_by_hand() -> None:
    taken = Concatenated(in_memory([[97, 98, 99, 256], [100, 256]]), 4).take([0, 1])
    assert taken["tokens"].tolist() == [[97, 98, 99, 256], [100, 256, 0, 0]]
    assert taken["targets"].tolist() == [[98, 99, 256, 100], [256, 0, 0, 0]]
    assert taken["weights"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert taken["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert taken["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_only_learned_targets_have_a_weight() -> None:
    rows = Concatenated(in_memory([[1, 2, 3], [4, 5]], [[1, 0, 1], [1, 1]]), 5)
    assert rows.take([0])["weights"].tolist() == [[0, 1, 0, 1, 0]]
    assert rows.report.learned == 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sequence", [1, 2, 3, 7, 16, 200])
def test_rows_equal_the_definition(sequence: int, masked: bool) -> None:
    rng = np.random.default_rng(sequence)
    for count in (1, 2, 5, 20):
        lengths = [2, *rng.integers(1, 12, count).tolist()]
        learned = rng.random(sum(lengths)) < 0.5 if masked else None
        rows = rows_of(lengths, sequence, learned)
        expected = packed_plainly(lengths, sequence, learned)
        order = rng.permutation(len(rows))
        taken = rows.take(order)
        assert tuple(taken) == FIELDS
        for name in FIELDS:
            np.testing.assert_array_equal(taken[name], expected[name][order], err_msg=f"{name} {lengths}")
            assert taken[name].dtype == (np.float32 if name == "weights" else np.int32)
        assert rows.report.learned == expected["weights"].sum()
        assert rows.report.padding_share == pytest.approx((expected["segments"] == 0).mean())


@pytest.mark.parametrize("sequence", [1, 3, 8])
def test_every_token_but_a_documents_first_is_a_target_exactly_once(sequence: int) -> None:
    lengths = [2, 9, 3, 25, 2]
    taken = rows_of(lengths, sequence).take(np.arange(-(-(sum(lengths) - 1) // sequence)))
    counted = sorted(taken["targets"][taken["weights"] > 0].tolist())
    firsts = set(np.concatenate([[1], np.cumsum(lengths)[:-1] + 1]).tolist())
    assert counted == [t for t in range(1, sum(lengths) + 1) if t not in firsts]


@pytest.mark.parametrize(("tokens", "count", "padding"), [(8, 2, 0.0), (9, 2, 0.0), (10, 3, 2 / 12), (5, 1, 0.0)])
def test_number_of_rows_and_padding(tokens: int, count: int, padding: float) -> None:
    report = rows_of([tokens], 4).report
    assert (report.rows, report.tokens, report.documents) == (count, tokens, 1)
    assert report.padding_share == pytest.approx(padding)


def test_a_document_in_several_rows_is_named_by_its_pieces() -> None:
    rows = rows_of([3, 11, 1, 2], 4)
    # 0 0 0 1 | 1 1 1 1 | 1 1 1 1 | 1 1 2 3 | (3 is a target only)
    assert [rows.examples(row) for row in range(4)] == [[(0,), (1, 0)], [(1, 1)], [(1, 2)], [(1, 3), (2,), (3,)]]
    assert len(rows) == 4


def test_a_row_that_is_not_there_is_not_made_up() -> None:
    rows = rows_of([10], 4)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            rows.take([0, index])


def test_one_token_is_too_little() -> None:
    with raises_error("E-DATA-012"):
        rows_of([1], 4)
