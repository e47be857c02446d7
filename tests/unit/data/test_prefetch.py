from __future__ import annotations

import threading

import pytest

from forerun.data.prefetch import Prefetch


def test_items_come_in_order_and_end() -> None:
    with Prefetch(lambda step: step * step, 3, 7) as items:
        assert list(items) == [9, 16, 25, 36]
        assert list(items) == []


def test_it_runs_ahead_but_not_further() -> None:
    made: list[int] = []
    reached = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if len(made) == 3:
            reached.set()
        return step

    with Prefetch(make, 0, 100, ahead=2) as items:
        assert next(items) == 0
        assert reached.wait(10)  # 0 is taken, 1 and 2 are built without being asked for
    assert made == [0, 1, 2]


def test_an_error_is_raised_in_its_turn_and_once() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise KeyError("bad row")
        return step

    with Prefetch(make, 0, 5, ahead=4) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(KeyError, match="bad row"):
            next(items)
        assert list(items) == []


def test_waiting_is_measured() -> None:
    go = threading.Event()

    def make(step: int) -> int:
        assert go.wait(10)
        return step

    with Prefetch(make, 0, 2) as items:
        threading.Timer(0.05, go.set).start()
        next(items)
        assert 0.02 < items.waited_seconds < 5


def test_closing_ends_the_thread_and_the_items() -> None:
    before = threading.active_count()
    items = Prefetch(lambda step: step, 0, 10**9)
    next(items)
    items.close()
    items.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(items)
