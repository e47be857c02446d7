from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.data.documents import InMemory
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import BLOCK, Mixture, places_of
from forerun.data.order.rows import FIELDS


def part(count: int, first: int = 0, sequence: int = 4) -> Concatenated:
    """Row r starts with token first + r * sequence."""
    tokens = first + np.arange(count * sequence + 1, dtype=np.int32)
    return Concatenated(InMemory(tokens, np.array([0, len(tokens)])), sequence)


def test_without_weights_every_row_comes_once_per_epoch() -> None:
    mixture = Mixture([part(30), part(7), part(13)])
    assert (len(mixture), mixture.epoch, mixture.passes) == (50, 50, [1.0, 1.0, 1.0])
    drawn = mixture.drawn(np.arange(150), 3).reshape(3, 50)
    for epoch in drawn:
        assert sorted(epoch.tolist()) == list(range(50))
    assert len({tuple(epoch) for epoch in drawn.tolist()}) == 3


def test_one_part_has_the_order_of_its_rows_alone() -> None:
    rows = part(20)
    assert (
        Batches(rows, seed=5, batch=8).ids_at(9).tolist()
        == Batches(Mixture([rows]), seed=5, batch=8).ids_at(9).tolist()
    )


def test_weights_are_exact_in_every_block() -> None:
    weights = [0.5, 0.3, 0.2]
    mixture = Mixture([part(1000), part(33), part(5000)], weights)
    places = places_of(weights, "abc")
    assert sum(places) == BLOCK
    assert all(abs(count - weight * BLOCK) < 1 for count, weight in zip(places, weights, strict=True))
    for block in (0, 1, 77):
        rows = mixture.drawn(block * BLOCK + np.arange(BLOCK), 1)
        part_of = np.searchsorted([1000, 1033], rows, side="right")
        assert np.bincount(part_of).tolist() == list(places)
        assert max(abs(np.bincount(part_of[: BLOCK // 2], minlength=3) - np.array(places) / 2)) < 100, "well mixed"


def test_no_row_of_a_part_comes_again_before_all_its_others() -> None:
    sizes = (100, 7, 1501)
    mixture = Mixture([part(size) for size in sizes], [3, 1, 2])
    rows = mixture.drawn(np.arange(3 * BLOCK), 9)
    for p, size in enumerate(sizes):
        first = sum(sizes[:p])
        own = rows[(rows >= first) & (rows < first + size)] - first
        passes = [own[at : at + size] for at in range(0, len(own) - size, size)]
        assert passes
        assert all(sorted(one.tolist()) == list(range(size)) for one in passes)
        assert len({tuple(one) for one in passes[:2]}) == len(passes[:2]), "each pass in another order"


def test_places_are_found_without_the_ones_before() -> None:
    mixture = Mixture([part(100), part(7)], [3, 1])
    whole = mixture.drawn(np.arange(3 * BLOCK), 2)
    for at in ([0], [5000, 17, 9000], [3 * BLOCK - 1]):
        assert mixture.drawn(at, 2).tolist() == whole[at].tolist()
    assert mixture.drawn(np.arange(500), 3).tolist() != whole[:500].tolist()


def test_the_order_is_frozen() -> None:
    """A resumed run must meet the same order after any upgrade: these figures never change."""
    mixture = Mixture([part(100), part(7)], [3, 1])
    assert mixture.drawn(np.arange(8), 0).tolist() == EARLY
    assert mixture.drawn(10**9 + np.arange(8), 42).tolist() == LATE


def test_an_epoch_lasts_until_the_longest_part_is_through() -> None:
    mixture = Mixture([part(6000), part(100)], [3, 1])
    assert mixture.epoch == 8000
    assert mixture.passes == pytest.approx([1, 20])
    seen = Counter(mixture.drawn(np.arange(mixture.epoch), 4).tolist())
    assert sum(1 for row in range(6000) if seen[row] == 1) >= 5950, "all but the last places of a block"
    assert Batches(mixture, seed=0, batch=4).rows.epoch == 8000


def test_rows_and_examples_come_from_their_part() -> None:
    parts = [part(5), part(3, first=1000)]
    mixture = Mixture(parts)
    taken = mixture.take([6, 0, 7, 4])
    for name in FIELDS:
        expected = np.concatenate([parts[1].take([1])[name], parts[0].take([0])[name], parts[1].take([2])[name]])
        np.testing.assert_array_equal(taken[name][:3], expected)
    assert taken["tokens"][:, 0].tolist() == [1004, 0, 1008, 16]
    assert mixture.examples(6) == [(1, 0, 1)]
    assert mixture.examples(4) == [(0, 0, 4)]
    for row in (-1, 8):
        with pytest.raises(IndexError):
            mixture.take([row])


def test_a_part_that_would_never_be_drawn_is_refused() -> None:
    with raises_error("E-DATA-016", "data.mixture.small:"):
        Mixture([part(5), part(5)], [1, 1e-5], ["large", "small"])
    for weight in (0, -1, float("nan"), float("inf")):
        with raises_error("E-DATA-015", "data.mixture.b:"):
            Mixture([part(5), part(5)], [1, weight], ["a", "b"])


def test_rows_of_other_lengths_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="cannot be mixed"):
        Mixture([part(5), part(5, sequence=8)])


def test_weights_and_parts_make_the_digest() -> None:
    a, b = part(5), part(6)
    digests = [Mixture(*given).digest for given in (([a, b],), ([b, a],), ([a, b], [1, 1]), ([a, b], [1, 2]))]
    assert len(set(digests)) == 4
    assert Mixture([a]).digest == a.digest


EARLY = [93, 23, 106, 101, 78, 92, 82, 99]
LATE = [64, 52, 85, 105, 104, 102, 100, 103]
