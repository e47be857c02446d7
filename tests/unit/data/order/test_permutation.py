"""The order of the data: a true permutation at every size, fixed for ever, random enough, and cheap at any place."""

from __future__ import annotations

import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.data.order.batches import Batches
from forerun.data.order.mixture import Mixture
from forerun.data.order.permutation import ORDER, BlockOrder, _once, _round_keys, permuted, permuted_within
from forerun.hardware.object_storage import BLOCK_BYTES, BlockSizes


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


EARLY = [984, 1193, 576, 1137, 70, 466, 1244, 456, 981, 1197, 583, 1130]
LATE = [868, 1106, 866]
LARGE = [6583328614]
parts_of_data = st.lists(st.integers(0, 400), min_size=1, max_size=4).filter(any)


def part(rows: int, digest: str = "d", sequence: int = 4) -> Any:
    class Rows(SimpleNamespace):
        def __len__(self) -> int:
            return rows

    return Rows(sequence=sequence, digest=digest)


@settings(max_examples=150, deadline=None)
@given(parts_of_data, st.integers(1, 70), st.integers(1, 300), st.integers(0, 9))
def test_every_row_occurs_once_in_an_epoch(parts: list[int], block_rows: int, lanes: int, epoch: int) -> None:
    order = BlockOrder(tuple(parts), BlockSizes(block_rows, lanes))
    rows = order.rows_at(np.arange(order.rows), 3, epoch)
    assert np.array_equal(np.sort(rows), np.arange(sum(parts)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10**12), st.integers(1, 1 << 22))
def test_sizes_are_within_their_limits(rows: int, row_bytes: int) -> None:
    sizes = BlockSizes.of(rows, row_bytes)
    assert 1 <= sizes.block_rows <= max(1, BLOCK_BYTES // row_bytes)
    assert sizes.lanes in (1024, 2048, 4096)
    assert sizes.block_rows == 1 or rows // sizes.block_rows >= 64 * sizes.lanes


def test_sizes_of_known_data() -> None:
    assert BlockSizes.of(1000, 8192) == BlockSizes(1, 1024)  # a complete permutation
    assert BlockSizes.of(1_220_703, 8192) == BlockSizes(18, 1024)  # 10 GB
    assert BlockSizes.of(8_388_608, 8192) == BlockSizes(64, 2048)  # 64 GiB
    assert BlockSizes.of(7_324_218_750, 8192) == BlockSizes(64, 4096)  # 15T tokens


def test_the_order_stays_as_it_is() -> None:
    order = BlockOrder((1000, 300), BlockSizes(16, 8))
    assert order.rows_at(np.arange(12), 7, 0).tolist() == EARLY
    assert order.rows_at([1299, 640, 3], 42, 5).tolist() == LATE
    assert BlockOrder((7_324_218_750,), BlockSizes(64, 4096)).rows_at([10**9], 1, 0).tolist() == LARGE


def test_neighbours_in_a_batch_are_of_different_blocks() -> None:
    order = BlockOrder((64 * 4096,), BlockSizes(64, 256))
    for begin in (0, 5000, 100_000):
        blocks = order.rows_at(begin + np.arange(256), 1, 0) // 64
        assert len(np.unique(blocks)) >= 255  # a block that a border of lanes cuts may occur twice


def test_a_lane_uses_one_block_after_the_other_and_lanes_do_not_change_blocks_together() -> None:
    rows, lanes = 16, 32
    order = BlockOrder((rows * 4096,), BlockSizes(rows, lanes))
    blocks = order.rows_at(np.arange(rows * 4096), 5, 0).reshape(-1, lanes) // rows  # [time, lane]
    changes = blocks[1:] != blocks[:-1]
    uses = [len(np.unique(lane)) for lane in blocks.T]
    assert max(uses) <= 4096 // lanes + 2
    # No block is used again after another one, except for the one that the lane begins with.
    assert max(changes.sum(0)) <= 4096 // lanes + 1
    steady = changes[: rows * 8].sum(1)
    assert steady.max() <= 2 * lanes / rows + 1


def test_a_host_reads_only_its_lanes() -> None:
    """Eight hosts together read each block about once, instead of each host every block."""
    count, rows, batch, hosts = 4 * 65536, 4, 256, 8
    batches = Batches(Mixture([part(count)], row_bytes=8192), seed=3, batch=batch)
    assert batches.rows.block_orders[0].sizes == BlockSizes(rows, 1024)
    read: list[set[int]] = [set() for _ in range(hosts)]
    for step in range(count // batch):
        ids = batches.ids_at(step).reshape(hosts, -1)
        for host in range(hosts):
            read[host].update((ids[host] // rows).tolist())
    total = sum(map(len, read))
    assert 65536 <= total <= 65536 * 1.05


def test_mixtures_with_and_without_weights_use_the_order() -> None:
    parts = [part(9000, "a"), part(5000, "b")]
    plain = Mixture(parts)
    plain.block_orders = [BlockOrder((9000, 5000), BlockSizes(7, 16))]
    drawn = plain.drawn(np.arange(28_000), 3)
    assert np.array_equal(np.sort(drawn[:14_000]), np.arange(14_000))
    assert np.array_equal(np.sort(drawn[14_000:]), np.arange(14_000))
    assert drawn[:14_000].tolist() != drawn[14_000:].tolist()
    weighted = Mixture(parts, [3, 1])
    weighted.block_orders = [BlockOrder((rows,), BlockSizes(7, 16)) for rows in (9000, 5000)]
    rows = weighted.drawn(np.arange(12_288), 3)
    first = rows[rows < 9000][:9000]  # shares are exact in blocks of places only
    assert np.array_equal(np.sort(first), np.arange(9000))
    assert weighted.drawn([11_000, 5], 3).tolist() == [rows[11_000], rows[5]]


def test_the_order_is_part_of_the_identity_and_rows_keep_theirs() -> None:
    one, other = part(600_000), part(140_000)
    assert Mixture([one]).order == ORDER == "feistel-8"
    assert Mixture([one], row_bytes=8192).order == "feistel-8 blocks-1/9/1024"
    assert Mixture([one, other], [1, 1], row_bytes=8192).order == "feistel-8 blocks-1/9/1024 blocks-1/2/1024"
    assert Mixture([one], row_bytes=8192).digest == Mixture([one]).digest


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_permutations_of_different_sizes_are_computed_together(sizes: list[int]) -> None:
    places = np.concatenate([np.arange(size) for size in sizes])
    each = np.repeat(sizes, sizes)
    number = np.repeat(np.arange(len(sizes)), sizes)
    found = permuted_within(places, each, number, 9)
    for n, size in enumerate(sizes):
        assert sorted(found[number == n].tolist()) == list(range(size))
    alone = permuted_within(places[number == 0], each[number == 0], number[number == 0], 9)
    assert found[number == 0].tolist() == alone.tolist()


def test_small_permutations_are_uniform() -> None:
    """The number at place 0 of 6,000 permutations of 8 is each of 0 .. 7 equally often (chi-squared, p = 0.001)."""
    numbers = np.arange(6000)
    found = permuted_within(np.zeros(6000, np.int64), np.full(6000, 8), numbers, 4)
    counts = np.bincount(found, minlength=8)
    assert ((counts - 750) ** 2 / 750).sum() < 24.3


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        BlockOrder((10,), BlockSizes(2, 2)).rows_at([10], 0)
