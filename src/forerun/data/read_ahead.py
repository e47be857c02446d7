"""Reading of batches ahead of their step, in several threads, for data in a bucket.

A batch from a bucket needs a few requests one after the other, of tens of milliseconds each. Batch t is a pure function
of t, so several threads build the next batches at the same time, and each waits only for its own requests. The batches
are returned in order. A feed (`feed.py`) takes them from here instead of building them itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from forerun.data.feed import BatchSource
from forerun.data.order.batches import Batches
from forerun.data.order.rows import Example
from forerun.data.reads.store_reads import StoreReads

H = TypeVar("H")

# With 8 threads, a batch may take 8 times as long as a step. Three round trips of 30 ms are hidden at 80 steps per
# second, as far as the processor allows it.
THREADS = 8
AHEAD_BYTES = 1 << 27  # of batches that are built and not taken yet; at least two batches
CLOSE_SECONDS = 1.0  # for a batch that is being built


class StepSource(BatchSource[Any], Protocol):
    """Batches, and the examples of each for the ledger."""

    def examples_at(self, step: int) -> list[Example]: ...


class ReadAhead(Generic[H]):
    """Batches by step, built ahead in threads. It is a `BatchSource` for one consumer with ascending steps.

    Args:
      source: builds the batches. It is called in several threads.
      stop: step after the last one.
      examples: returns the examples of a step for the ledger; None: there is no ledger. They are looked up together
        with the batch, because the same document borders are needed.
      threads: how many batches are built at the same time.
      limit_bytes: of batches that wait.

    An exception is raised when its batch is due. `close` ends the threads.
    """

    def __init__(
        self,
        source: BatchSource[H],
        stop: int,
        *,
        examples: Callable[[int], list[Example]] | None = None,
        threads: int = THREADS,
        limit_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._source, self._stop, self._examples = source, stop, examples
        self._limit_bytes, self._most, self._depth = limit_bytes, threads, min(2, threads)
        self._jobs: SimpleQueue[tuple[int, SimpleQueue[Any]] | None] = SimpleQueue()
        self._due: dict[int, SimpleQueue[Any]] = {}  # the results of steps that were asked for, by step
        self._found: dict[int, list[Example]] = {}  # examples by step, until the ledger takes them
        self._closed = False
        # Daemon threads: the end of the process must not wait for a bucket that does not answer.
        self._threads = [
            threading.Thread(target=self._work, name=f"forerun-read-ahead-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def batch_at(self, step: int, /) -> H:
        """Return batch `step`, and start to build the batches after it."""
        for old in [one for one in self._due if one < step]:
            del self._due[old]
        for wanted in range(step, max(step + 1, min(step + self._depth, self._stop))):
            if wanted not in self._due:
                self._due[wanted] = SimpleQueue()
                self._jobs.put((wanted, self._due[wanted]))
        batch, error = self._due[step].get()
        del self._due[step]
        if error is not None:
            raise error
        size_bytes = max(1, _size_bytes(batch))
        self._depth = max(min(2, self._most), min(self._most, self._limit_bytes // size_bytes))
        return batch

    def examples_at(self, step: int) -> list[Example]:
        """Return the examples of a step. They are known if its batch was built here."""
        found = self._found.pop(step, None)
        if found is not None:
            return found
        assert self._examples is not None
        return self._examples(step)

    def close(self) -> None:
        """End the threads. One that still waits for a bucket after CLOSE_SECONDS is abandoned."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for result in list(self._due.values()):
            result.put((None, RuntimeError("the reading ahead is closed")))
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            step, result = job
            try:
                batch = self._source.batch_at(step)
                if self._examples is not None:
                    self._found[step] = self._examples(step)
            except BaseException as error:  # SystemExit too: it would end this thread only, and the consumer would wait
                result.put((None, error))
            else:
                result.put((batch, None))
                del batch  # otherwise this thread keeps it in memory until its next one is built
            del job, result


@contextmanager
def read_ahead(batches: Batches, reads: StoreReads | None, stop: int, *, has_ledger: bool) -> Iterator[StepSource]:
    """Yield the source of a run's batches: read ahead if data is in a bucket (`reads`), else the batches themselves."""
    if reads is None:
        yield batches
        return
    with ReadAhead(batches, stop, examples=batches.examples_at if has_ledger else None) as ahead:
        yield ahead


def _size_bytes(batch: Any) -> int:
    """Return the bytes of all arrays of a batch."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if isinstance(batch, Mapping):
        return sum(_size_bytes(value) for value in batch.values())
    return sum(_size_bytes(value) for value in vars(batch).values()) if hasattr(batch, "__dict__") else 0
