from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from forerun.data.documents import InMemory
from forerun.data.early.mixture import EarlyMixture
from forerun.data.early.stream import OpenRange, WindowStream
from forerun.data.early.windows import UnitRange
from forerun.data.order.batches import Batches, require_one_batch
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import BLOCK, places_of
from forerun.errors import UserError

SEQUENCE = 4


class Units:
    """Units of several parts. Unit u of part p has `counts[p][u]` rows; the first token of each row names it."""

    def __init__(self, *counts: list[int]) -> None:
        self.counts = counts
        self.opened: list[UnitRange] = []

    def opener(self, units: UnitRange) -> OpenRange:
        self.opened.append(units)
        counts = self.counts[units.part]
        before, held = sum(counts[: units.start]), sum(counts[units.start : units.stop])
        first = 100_000 * units.part + before * SEQUENCE
        tokens = first + np.arange(held * SEQUENCE + (held > 0), dtype=np.int32)
        return OpenRange(Concatenated(InMemory(tokens, np.array([0, len(tokens)])), SEQUENCE), 10 * units.start)

    def mixture(self, *windows: list[tuple[UnitRange, ...]], weights: list[float] | None = None) -> EarlyMixture:
        keys = [()] if weights is None else [(p,) for p in range(len(windows))]
        streams = [WindowStream(one, self.opener, key) for one, key in zip(windows, keys, strict=True)]
        names = [str(p) for p in range(len(self.counts))]
        return EarlyMixture(streams, weights, names, sequence=SEQUENCE, digest="d")


def singles(part: int, count: int) -> list[tuple[UnitRange, ...]]:
    return [(UnitRange(part, unit, unit + 1),) for unit in range(count)]


def row_names(mixture: EarlyMixture, places: np.ndarray, seed: int = 3) -> list[tuple[int, int]]:
    """Part and number of the rows at these places, from their content."""
    tokens = mixture.take(mixture.drawn(places, seed))["tokens"][:, 0]
    return [(int(token) // 100_000, int(token) % 100_000 // SEQUENCE) for token in tokens]


def test_the_first_pass_goes_from_window_to_window_and_the_next_ones_permute_all_rows() -> None:
    units = Units([7, 5, 20, 3])
    mixture = units.mixture(singles(0, 4))
    places = np.arange(3 * 35)
    found = [row for _, row in row_names(mixture, places)]
    borders = [0, 7, 12, 32, 35]
    for begin, end in pairwise(borders):
        window = found[begin:end]
        assert sorted(window) == list(range(begin, end))
        assert end - begin < 6 or window != sorted(window)
    for begin in (35, 70):
        assert sorted(found[begin : begin + 35]) == list(range(35))
    assert found[35:70] != found[70:]
    assert sum(row < 7 for row in found[35:42]) < 7, "later passes mix all windows"
    alone = [row_names(units.mixture(singles(0, 4)), np.array([place]))[0][1] for place in (0, 6, 11, 34, 35, 104)]
    assert alone == [found[place] for place in (0, 6, 11, 34, 35, 104)], "any place alone"
    assert row_names(mixture, places, seed=4) != row_names(mixture, places)


def test_only_the_windows_of_a_place_are_waited_for() -> None:
    units = Units([7, 5, 20, 3])
    mixture = units.mixture(singles(0, 4))
    assert mixture.known_rows(3) == 7
    mixture.drawn(np.arange(7), 0)
    assert [one.start for one in units.opened] == [0]
    assert mixture.epoch is None
    mixture.drawn(np.array([7]), 0)
    assert [one.start for one in units.opened] == [0, 1]
    assert mixture.known_rows(13) == 32
    assert (len(mixture), mixture.epoch, [one.start for one in units.opened]) == (35, 35, [0, 1, 2, 3])


def test_a_window_of_several_parts_is_mixed_and_documents_count_from_the_start_of_their_part() -> None:
    units = Units([10, 10], [6])
    mixture = units.mixture([(UnitRange(0, 0, 1), UnitRange(1, 0, 1)), (UnitRange(0, 1, 2),)])
    names = row_names(mixture, np.arange(26))
    assert sorted(names[:16]) == [(0, row) for row in range(10)] + [(1, row) for row in range(6)]
    assert sorted(names[16:]) == [(0, row) for row in range(10, 20)]
    row = int(mixture.drawn(np.array([16]), 3)[0])
    assert mixture.examples(row) == [(0, 10, row - 16)], "document 0 of unit 1, which has 10 documents before it"


def test_weights_are_exact_and_each_part_has_its_own_windows() -> None:
    units = Units([500, 900], [100, 200, 9000])
    weights = [3.0, 1.0]
    mixture = units.mixture(singles(0, 2), singles(1, 3), weights=weights)
    names = row_names(mixture, np.arange(BLOCK))
    own = [[row for part, row in names if part == p] for p in (0, 1)]
    assert [len(rows) for rows in own] == list(places_of(weights, "ab"))
    assert sorted(own[0][:500]) == list(range(500))
    assert sorted(own[0][500:1400]) == list(range(500, 1400))
    assert sorted(own[0][1400:2800]) == list(range(1400)), "the second pass of the part"
    assert sorted(own[1][:100]) == list(range(100))
    assert sorted(own[1][100:300]) == list(range(100, 300))
    assert len(mixture) == 10_700
    assert row_names_of(mixture, [0, 1399, 1400, 10_699]) == [(0, 0), (0, 1399), (1, 0), (1, 9299)]
    assert mixture.passes[1] == pytest.approx(1.0, abs=0.01)


def row_names_of(mixture: EarlyMixture, rows: list[int]) -> list[tuple[int, int]]:
    tokens = mixture.take(mixture.numbered(rows))["tokens"][:, 0]
    return [(int(token) // 100_000, int(token) % 100_000 // SEQUENCE) for token in tokens]


def test_a_window_without_rows_is_passed_over_and_data_without_rows_is_an_error() -> None:
    units = Units([0, 5, 0, 4])
    names = row_names(units.mixture(singles(0, 4)), np.arange(18))
    assert sorted(names[:5]) == [(0, row) for row in range(5)]
    assert sorted(names[9:]) == [(0, row) for row in range(9)]
    with pytest.raises(UserError) as nothing:
        Units([0, 0]).mixture(singles(0, 2)).drawn(np.array([0]), 0)
    assert nothing.value.code == "E-DATA-012"


def test_a_batch_waits_for_its_rows_and_more_rows_than_there_are_is_an_error() -> None:
    units = Units([3, 3, 100])
    require_one_batch(units.mixture(singles(0, 3)), 6)
    assert [one.start for one in units.opened] == [0, 1]
    with pytest.raises(UserError) as small:
        require_one_batch(units.mixture(singles(0, 3)), 107)
    assert small.value.code == "E-DATA-013"


def test_the_batch_is_the_same_on_any_number_of_hosts() -> None:
    rows = Units([9, 40]).mixture(singles(0, 2))
    whole = Batches(rows, seed=1, batch=8, accumulation=2).batch_at(2).tokens
    held = [np.array([0, 3]), np.array([1, 2])]
    for own in held:
        alone = Units([9, 40]).mixture(singles(0, 2))
        part = Batches(alone, seed=1, batch=8, accumulation=2, held=own).batch_at(2).tokens
        assert np.array_equal(part, whole[:, own])
