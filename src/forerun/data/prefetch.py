"""Building the next batches on a background thread while the current step runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class _End:
    """No more items; `error` is what ended it, if anything went wrong."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Yields make(start) .. make(stop - 1) in order, with at most `ahead` results built and not yet taken.

    An exception in `make` is raised to the consumer in its turn. `waited_seconds` is how long the consumer was
    blocked so far.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least 1")
        self.waited_seconds = 0.0
        self._make, self._steps = make, range(start, stop)
        self._built: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._run, name="forerun-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise RuntimeError("the prefetch is closed")
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        item = self._built.get()
        self.waited_seconds += time.perf_counter() - began
        if isinstance(item, _End):
            self._ended = True
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._room.release()
        return item

    def close(self) -> None:
        """Stop the thread and wait until it has gone (a running `make` is finished first)."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for step in self._steps:
                self._room.acquire()
                if self._closed:
                    return
                self._built.put(self._make(step))
        except BaseException as error:
            self._built.put(_End(error))
        else:
            self._built.put(_End())
