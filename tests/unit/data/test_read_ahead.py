from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from forerun.data import read_ahead
from forerun.data.feed import Feed
from forerun.data.read_ahead import ReadAhead
from forerun.errors import UserError


class Numbered:
    """Batches that hold the number of their step."""

    def __init__(self, act: Callable[[int], None] = lambda step: None, size: int = 10) -> None:
        self.act, self.size, self.asked = act, size, list[int]()

    def batch_at(self, step: int) -> dict[str, Any]:
        self.asked.append(step)
        self.act(step)
        return {"tokens": np.full(self.size, step)}


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any("read-ahead" in one.name for one in threading.enumerate()):
        time.sleep(0.01)
    assert not [one.name for one in threading.enumerate() if "read-ahead" in one.name]


def test_batches_come_in_order_and_are_built_at_the_same_time() -> None:
    barrier = threading.Barrier(4)  # passes only if four batches are built at the same time

    def act(step: int) -> None:
        if 8 <= step < 12:
            barrier.wait(20)

    source = Numbered(act)
    with ReadAhead(source, 12, threads=4) as ahead, Feed(ahead, lambda batch: int(batch["tokens"][0]), 3, 12) as feed:
        assert list(feed) == list(range(3, 12))
    assert sorted(source.asked) == list(range(3, 12))


def test_an_exception_is_raised_at_its_step() -> None:
    def act(step: int) -> None:
        if step == 4:
            raise UserError("E-DATA-180", "x", why="y", fix="z")

    with ReadAhead(Numbered(act), 20) as ahead, Feed(ahead, lambda batch: int(batch["tokens"][0]), 0, 20) as feed:
        assert [next(feed) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(UserError) as caught:
            next(feed)
    assert caught.value.code == "E-DATA-180"


def test_closing_does_not_wait_for_a_bucket_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "CLOSE_SECONDS", 0.05)
    answer, caught = threading.Event(), list[str]()

    def act(step: int) -> None:
        if step >= 2:
            answer.wait(20)

    def take() -> None:
        try:
            ahead.batch_at(2)
        except RuntimeError as error:
            caught.append(str(error))

    with ReadAhead(Numbered(act), 20) as ahead:
        assert ahead.batch_at(0)["tokens"][0] == 0
        assert ahead.batch_at(1)["tokens"][0] == 1
        waiting = threading.Thread(target=take)
        waiting.start()
        while 2 not in ahead._due:
            time.sleep(0.001)
    waiting.join(10)
    assert (waiting.is_alive(), len(caught)) == (False, 1)
    answer.set()


@pytest.mark.parametrize(("size", "most"), [(10, 8), (1 << 20, 2)])
def test_the_batches_that_wait_are_bounded(size: int, most: int) -> None:
    source = Numbered(size=size)  # 8 MiB each
    with ReadAhead(source, 100, limit_bytes=1 << 23) as ahead:
        for step in range(20):
            ahead.batch_at(step)
            assert len(ahead._due) <= most
            assert max(source.asked) <= step + most


def test_examples_are_found_with_their_batch() -> None:
    names: list[str] = []

    def examples(step: int) -> list[tuple[int, ...]]:
        names.append(threading.current_thread().name)
        return [(0, step)]

    with ReadAhead(Numbered(), 5, examples=examples) as ahead:
        for step in range(5):
            ahead.batch_at(step)
        assert [ahead.examples_at(step) for step in range(5)] == [[(0, step)] for step in range(5)]
        assert all("read-ahead" in name for name in names)
        assert ahead.examples_at(3) == [(0, 3)]
        assert "read-ahead" not in names[-1]
