"""Pairs in rows: both sides of a pair together, none split, too long ones as their policy says."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from error_assertions import raises_error

from forerun.data.documents import InMemory, in_memory
from forerun.data.order.batches import Batches
from forerun.data.order.mixture import Mixture
from forerun.data.order.pairs import PairDocuments, PairReferences, Pairs, describe_too_long
from forerun.objectives.pairs import max_pairs

S = 48


def documents(lengths: list[tuple[int, int, int]]) -> InMemory:
    """(prompt, chosen, rejected) lengths; prompts have tokens 1000 p + 1 ..., answers others."""
    rows, masks = [], []
    for pair, (prompt, *answers) in enumerate(lengths):
        for side, answer in enumerate(answers):
            shared = [1000 * pair + 1 + n for n in range(prompt)]
            rows.append(shared + [1000 * pair + 500 + 100 * side + n for n in range(answer)])
            masks.append([False] * prompt + [True] * answer)
    return in_memory(rows, masks)


def random_lengths(count: int, most: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(1, most, 3).tolist()) for _ in range(count)]  # type: ignore[misc]


def sides_in(arrays: dict[str, Any]) -> dict[int, dict[int, tuple[list[int], list[int]]]]:
    """pair -> side (0 chosen) -> (tokens with the last target, learned targets), found by the tokens alone."""
    found: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
    for row in range(len(arrays["tokens"])):
        for segment in range(1, arrays["segments"][row].max() + 1):
            here = arrays["segments"][row] == segment
            (whose,) = set(arrays["pairs"][row][here].tolist())
            tokens, targets = arrays["tokens"][row][here].tolist(), arrays["targets"][row][here].tolist()
            learned = arrays["targets"][row][here][arrays["weights"][row][here] > 0].tolist()
            assert arrays["positions"][row][here].tolist() == list(range(len(tokens)))
            assert tokens[1:] == targets[:-1]
            assert whose in ((segment + 1) // 2, -(segment // 2))
            found.setdefault(learned[-1] // 1000, {})[int(whose < 0)] = ([*tokens, targets[-1]], learned)
        assert not arrays["pairs"][row][arrays["segments"][row] == 0].any()
    return found


def test_every_pair_stands_once_with_both_sides_in_one_row() -> None:
    lengths = random_lengths(300, 12)
    rows = Pairs(documents(lengths), S)
    seen: list[int] = []
    for row in range(len(rows)):
        found = sides_in(rows.take([row]))
        assert list(found) == [pair for (pair,) in rows.examples(row)]
        assert len(found) <= max_pairs(S)
        assert rows.numbers([row])[0][: len(found)].tolist() == list(found)
        for pair, sides in found.items():
            prompt, *answers = lengths[pair]
            for side, answer in enumerate(answers):
                tokens, learned = sides[side]
                assert len(tokens) == prompt + answer
                assert learned == tokens[prompt:]
        seen += found
    assert sorted(seen) == list(range(300))
    assert rows.report.learned == sum(chosen + rejected for _, chosen, rejected in lengths)
    assert rows.report.positions == sum(2 * prompt + a + b - 2 for prompt, a, b in lengths)


def test_short_pairs_leave_room_so_that_a_row_never_has_too_many() -> None:
    rows = Pairs(documents([(1, 1, 1)] * 100), S)
    assert len(rows) == -(-100 // max_pairs(S))
    assert Pairs(documents([(1, 1, 1)] * 5), 4).report.rows == 5


def test_a_pair_too_long_loses_the_start_of_its_prompt_on_both_sides() -> None:
    lengths = [(20, 10, 14), (3, 30, 20), (30, 3, 3), (5, 24, 20), (6, 24, 20)]
    rows = Pairs(documents(lengths), S)
    found = sides_in(rows.take(np.arange(len(rows))))
    # 2 x prompt + answers - 2 positions: 62, 54, 64, 52, 54; cut by 7, (3 would take the whole prompt), 8, 2, 3.
    assert sorted(found) == [0, 2, 3, 4]
    for pair, cut in ((0, 7), (2, 8), (3, 2), (4, 3)):
        prompt, *answers = lengths[pair]
        for side, answer in enumerate(answers):
            tokens, learned = found[pair][side]
            assert tokens[0] == 1000 * pair + 1 + cut
            assert len(learned) == answer
            assert len(tokens) == prompt - cut + answer
    report = rows.report
    assert (report.too_long, report.dropped, report.documents) == (5, 1, 5)
    assert report.truncated_tokens == 2 * (7 + 8 + 2 + 3) + 56
    assert describe_too_long(report) == "5 pairs longer than a row: 4 lose the start of their prompt, 1 dropped"


def test_the_other_policies() -> None:
    lengths = [(20, 10, 14), (3, 5, 6)]
    rows = Pairs(documents(lengths), S, too_long="drop")
    assert rows.examples(0) == [(1,)]
    assert (len(rows), rows.report.dropped) == (1, 1)
    with raises_error("E-DATA-018", "1", "2") as stopped:
        Pairs(documents(lengths), S, too_long="stop")
    assert "sequence=62" in stopped.value.fix
    with raises_error("E-DATA-017"):
        Pairs(documents([(1, 40, 40)]), S)


def test_the_digest_knows_what_the_rows_depend_on() -> None:
    lengths = random_lengths(40, 12)
    digests = {
        Pairs(documents(lengths), S).digest,
        Pairs(documents(lengths[::-1]), S).digest,
        Pairs(documents(lengths), S + 1).digest,
        Pairs(documents(lengths), S, too_long="drop").digest,
    }
    assert len(digests) == 4
    again = pickle.loads(pickle.dumps(Pairs(documents(lengths), S)))
    assert again.digest in digests
    np.testing.assert_array_equal(again.take([0])["pairs"], Pairs(documents(lengths), S).take([0])["pairs"])


def test_pairs_together_are_documents() -> None:
    lengths = random_lengths(5, 12)
    sides = documents(lengths)
    whole = PairDocuments(sides)
    assert len(whole) == 5
    assert np.diff(whole.begins(np.arange(6))).tolist() == [2 * p + a + b for p, a, b in lengths]


def test_a_reference_goes_with_its_pair_into_the_batch() -> None:
    pairs = Pairs(documents(random_lengths(60, 12)), S)
    said = -np.arange(120, dtype=np.float32).reshape(60, 2)
    rows = Mixture([pairs]).with_extra(PairReferences((pairs,), (said,)))
    assert rows.digest == pairs.digest
    batch = Batches(rows, seed=3, batch=4, accumulation=2).batch_at(1)
    assert batch.extras["reference"].shape == (2, 2, max_pairs(S), 2)
    for a, b in np.ndindex(2, 2):
        arrays = {name: np.asarray(getattr(batch, name))[a, b][None] for name in ("tokens", "targets", "weights")}
        arrays |= {name: np.asarray(getattr(batch, name))[a, b][None] for name in ("segments", "positions")}
        present = list(sides_in(arrays | {"pairs": np.asarray(batch.extras["pairs"])[a, b][None]}))
        reference = np.asarray(batch.extras["reference"])[a, b]
        np.testing.assert_array_equal(reference[: len(present)], said[present])
        assert not reference[len(present) :].any()


def test_references_of_a_mixture_belong_to_their_part() -> None:
    parts = tuple(Pairs(documents(random_lengths(count, 12)), S) for count in (60, 25))
    values = tuple(-np.arange(2 * n, dtype=np.float32).reshape(n, 2) - 1000 * n for n in (60, 25))
    rows = Mixture(parts, [2, 1]).with_extra(PairReferences(parts, values))
    assert rows.digest == Mixture(parts, [2, 1]).digest
    order = np.random.default_rng(0).permutation(len(rows))
    for row, found in zip(order.tolist(), rows.take(order)["reference"], strict=True):
        expected = [values[part][pair].tolist() for part, pair in rows.examples(row)]
        assert found[: len(expected)].tolist() == expected
        assert not found[len(expected) :].any()
