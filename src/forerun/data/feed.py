"""Prefetching of batches: one thread builds them, another one places them on the devices.

Batch t is a pure function of t, so a feed has no state to save: a resumed run starts a new feed at its first step.

The threads and the consumer share `SimpleQueue` objects only. A signal handler can raise an exception in the consumer
at any bytecode (a supervisor's stop does). The methods of `SimpleQueue` are atomic in that respect. A lock that is
implemented in Python, such as that of a `Semaphore` or a `Future`, can stay locked, and then `close` would not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

H = TypeVar("H")
H_co = TypeVar("H_co", covariant=True)
P = TypeVar("P")

CLOSE_SECONDS = 5.0  # for a batch that is being built or placed


class BatchSource(Protocol[H_co]):
    """Batches by step. `batch_at` is a pure function."""

    def batch_at(self, step: int, /) -> H_co:
        """Return batch `step`, counted from 0, as NumPy arrays."""
        ...


@dataclass(frozen=True)
class _End:
    """The last item of a queue: no batch follows, because of `error` or because it was the last batch."""

    error: BaseException | None = None


class Feed(Generic[H, P]):
    """An iterator over `place(source.batch_at(step))` for the steps `start` .. `stop - 1`, in order.

    Args:
      source: builds the batches. It is called in one thread, with ascending steps.
      place: moves a batch to the devices. It is called in another thread, with one batch after the other.
      start: first step.
      stop: step after the last one.
      ahead: maximum number of placed batches that wait for the consumer. As many built batches wait on the host, and
        one more while it is placed.

    An exception of `batch_at` or `place` is raised when its batch is due, and ends the feed. `waited_seconds` is the
    total time for which the consumer was blocked.
    """

    def __init__(
        self, source: BatchSource[H], place: Callable[[H], P], start: int, stop: int, *, ahead: int = 2
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least 1")
        self.waited_seconds = 0.0
        self._source, self._place, self._steps = source, place, range(start, stop)
        self._closed = self._ended = False
        self._built: SimpleQueue[H | _End] = SimpleQueue()
        self._placed: SimpleQueue[P | _End] = SimpleQueue()
        # An entry is the permission to build or to place one more batch.
        self._may_build: SimpleQueue[None] = SimpleQueue()
        self._may_place: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead):
            self._may_build.put(None)
            self._may_place.put(None)
        # Daemon threads: the end of the process must not wait for a read that hangs.
        self._threads = [
            threading.Thread(target=self._build_all, name="forerun-feed-build", daemon=True),
            threading.Thread(target=self._place_all, name="forerun-feed-place", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        if self._closed:
            raise RuntimeError("the feed is closed")
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        try:
            item = self._placed.get()
        finally:
            self.waited_seconds += time.perf_counter() - began
        if not isinstance(item, _End):
            self._may_place.put(None)
            return item
        self._ended = True
        if isinstance(item.error, StopIteration):  # would look like the end of the data (PEP 479)
            raise RuntimeError("a batch raised StopIteration") from item.error
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """End both threads and wait for them.

        A thread that is still blocked after `CLOSE_SECONDS`, such as by a network disk that does not answer, is
        abandoned: it neither places a batch nor keeps the process from ending.
        """
        self._closed = True
        # Wake the threads, so that they see `_closed`.
        self._may_build.put(None)
        self._may_place.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build_all(self) -> None:
        end = _End()
        try:
            for step in self._steps:
                self._may_build.get()
                if self._closed:
                    break
                self._built.put(self._source.batch_at(step))
        except BaseException as error:  # SystemExit too: it would end this thread only, and the consumer would wait
            end = _End(error)
        self._built.put(end)

    def _place_all(self) -> None:
        end = _End()
        try:
            while True:
                self._may_place.get()
                batch = self._built.get()
                if isinstance(batch, _End):
                    end = batch
                    break
                if self._closed:
                    break
                self._may_build.put(None)
                self._placed.put(self._place(batch))
                del batch  # otherwise the host keeps it in memory until the next batch is built
        except BaseException as error:
            end = _End(error)
        self._placed.put(end)
