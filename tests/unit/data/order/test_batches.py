from __future__ import annotations

import numpy as np
from error_assertions import raises_error

from forerun.data.documents import InMemory, in_memory
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated


def rows(count: int, sequence: int = 4) -> Concatenated:
    """Row r starts with token r * sequence."""
    tokens = np.arange(count * sequence + 1, dtype=np.int32)
    return Concatenated(InMemory(tokens, np.array([0, len(tokens)])), sequence)


def test_every_row_is_used_once_per_epoch_across_the_borders() -> None:
    batches = Batches(rows(10), seed=3, batch=4)
    assert batches.rows.epoch == 10
    drawn = np.concatenate([batches.ids_at(step) for step in range(15)]).reshape(6, 10)
    for epoch in drawn:
        assert sorted(epoch.tolist()) == list(range(10))
    assert len({tuple(epoch) for epoch in drawn.tolist()}) == 6


def test_the_order_is_frozen() -> None:
    """A resumed run must meet the same order after any upgrade: these figures never change."""
    batches = Batches(rows(10), seed=3, batch=10)
    assert batches.ids_at(0).tolist() == [5, 7, 8, 2, 4, 6, 1, 3, 0, 9]
    assert batches.ids_at(1).tolist() == [0, 7, 2, 6, 1, 3, 8, 5, 4, 9]


def test_a_step_depends_on_seed_and_step_only() -> None:
    ahead, fresh = Batches(rows(50), seed=1, batch=8), Batches(rows(50), seed=1, batch=8)
    for step in (40, 0, 13, 6):
        ahead.ids_at(step)
    np.testing.assert_array_equal(ahead.ids_at(20), fresh.ids_at(20))
    assert Batches(rows(50), seed=2, batch=8).ids_at(20).tolist() != fresh.ids_at(20).tolist()


def test_a_batch_holds_the_rows_it_names() -> None:
    source = rows(9)
    batches = Batches(source, seed=0, batch=6, accumulation=3)
    batch = batches.batch_at(1)
    assert batch.tokens.shape == batch.weights.shape == (3, 2, 4)
    assert (batch.tokens[..., 0] // 4).ravel().tolist() == batches.ids_at(1).tolist()
    for name, array in source.take(batches.ids_at(1)).items():
        np.testing.assert_array_equal(getattr(batch, name).reshape(6, 4), array)


def test_hosts_together_build_the_global_batch() -> None:
    whole = Batches(rows(40), seed=5, batch=16, accumulation=2).batch_at(3)
    shares = np.split(np.arange(8), 4)
    parts = [Batches(rows(40), seed=5, batch=16, accumulation=2, held=held).batch_at(3) for held in shares]
    for name in ("tokens", "targets", "weights", "segments", "positions"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_array_equal(joined, getattr(whole, name))


def test_a_host_may_hold_rows_that_are_not_neighbours() -> None:
    whole = Batches(rows(40), seed=5, batch=16, accumulation=2).batch_at(3)
    part = Batches(rows(40), seed=5, batch=16, accumulation=2, held=np.array([1, 6])).batch_at(3)
    np.testing.assert_array_equal(part.tokens, whole.tokens[:, [1, 6]])


def test_examples_are_those_of_the_batchs_rows() -> None:
    batches = Batches(Concatenated(in_memory([[1, 2], [3, 4, 5], [6, 7, 8]]), 4), seed=0, batch=2)
    by_row = [[(0, 0), (0, 1, 0)], [(0, 1, 1), (0, 2)]]  # 0 0 1 1 | 1 2 2 2
    for step in range(4):
        assert batches.examples_at(step) == [example for row in batches.ids_at(step) for example in by_row[row]]


def test_too_few_rows_is_the_users_error_with_figures() -> None:
    with raises_error("E-DATA-013", "3", "4") as error:
        Batches(rows(3), seed=0, batch=4)
    assert "batch=3" in error.value.fix


def test_an_uneven_accumulation_is_an_error() -> None:
    with raises_error("E-DATA-011"):
        Batches(rows(10), seed=0, batch=5, accumulation=2)
