"""The order of the data: a true permutation at every size, fixed for ever, random enough, and cheap at any place."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from forerun.data.order.batches import Batches
from forerun.data.order.permutation import _once, _round_keys, permuted


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 65_537])
def test_every_place_is_used_once(size: int) -> None:
    assert sorted(permuted(np.arange(size), size, 7, 3).tolist()) == list(range(size))


def test_the_order_is_fixed_for_ever() -> None:
    """A resumed run must meet the batches it would have met: these numbers never change."""
    assert permuted(np.arange(10), 10, 0, 0).tolist() == FIRST
    assert permuted(np.arange(5), 10**9, 42, 1).tolist() == LATER


def test_places_do_not_depend_on_their_neighbours() -> None:
    whole = permuted(np.arange(1000), 1000, 5)
    assert [int(permuted([n], 1000, 5)[0]) for n in (0, 1, 500, 999)] == whole[[0, 1, 500, 999]].tolist()


def test_keys_give_other_orders() -> None:
    orders = {tuple(permuted(np.arange(50), 50, seed, epoch)) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36
    assert not np.array_equal(permuted(np.arange(50), 50, 1, 23), permuted(np.arange(50), 50, 12, 3))


def permuted_by_seeds(size: int, seeds: range) -> np.ndarray:
    """Return the permutation of each seed [seeds, size], all computed together: `permuted` takes one key only."""
    keys = np.stack([_round_keys((seed,)) for seed in seeds], axis=1)[:, :, None]
    half = np.uint64(-(-(size - 1).bit_length() // 2))
    found = _once(np.broadcast_to(np.arange(size, dtype=np.uint64), (len(seeds), size)), half, keys)
    while (outside := found >= size).any():
        found = np.where(outside, _once(found, half, keys), found)
    return found.astype(np.int64)


def test_every_place_goes_everywhere_equally_often() -> None:
    """20,000 keys, 10 places: each of the 100 counts within five standard deviations of 2,000."""
    orders = permuted_by_seeds(10, range(20_000))
    for seed in range(0, 20_000, 100):
        np.testing.assert_array_equal(orders[seed], permuted(np.arange(10), 10, seed))
    counts = np.stack([np.bincount(column, minlength=10) for column in orders.T])
    assert counts.shape == (10, 10)
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(20_000 * 0.1 * 0.9)


def test_neighbours_do_not_stay_neighbours() -> None:
    """No step is common: a linear congruence would have one step only."""
    size = 100_003
    steps = np.diff(permuted(np.arange(size), size, 9)) % size
    _, counts = np.unique(steps, return_counts=True)
    assert counts.max() < 12
    runs = permuted(np.arange(size), size, 9) // (size // 10)
    together = np.mean(runs[1:] == runs[:-1])
    assert 0.095 < together < 0.105, "a tenth of the neighbours land in the same tenth"


def test_beyond_the_end_is_an_error() -> None:
    with pytest.raises(IndexError):
        permuted([10], 10, 0)


class ManyRows:
    sequence = tokens = 1

    def __len__(self) -> int:
        return 10**9


@pytest.mark.timing
def test_batch_a_million_of_a_billion_rows_is_found_at_once() -> None:
    """Neither memory nor time grows with the rows or the step."""
    batches = Batches(ManyRows(), seed=3, batch=1024)  # type: ignore[arg-type]
    tracemalloc.start()
    ids = batches.ids_at(1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 1024
    assert peak < 2e6

    def seconds(step: int) -> float:
        began = time.thread_time()
        batches.ids_at(step)
        return time.thread_time() - began

    first, late = (min(seconds(step) for _ in range(5)) for step in (0, 1_000_000))
    assert late < 100 * first, "a million times as late"


FIRST = [2, 3, 0, 6, 5, 1, 7, 4, 8, 9]
LATER = [192645244, 850118917, 452682224, 158070512, 219408558]
