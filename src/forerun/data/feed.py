"""Carrying batches to the devices ahead of the step that eats them.

Grain builds them, in a thread or in processes of their own; one more thread places them. Batch t is a pure function
of t, so nothing of a pipeline needs saving: one that breaks is built again at the step that is due.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from forerun.data.feeder import Failure, Source, Steps, behave
from forerun.errors import UserError
from forerun.interrupt import children_without_ctrl_c, cleanup, pressed

H = TypeVar("H")
P = TypeVar("P")

RESTARTS = 5  # in a row, without a batch in between
LOOK_SECONDS = 0.5  # between two looks at the feeders while nothing comes
PATIENCE_SECONDS = 10.0  # for Grain to report a dead feeder itself; it takes one or two
GRACE_SECONDS = 5.0  # for feeders to leave by themselves
QUIET = 256  # the exit code 0, where nobody should have left

_starting = threading.Lock()


def preload() -> None:
    """Import Grain on a thread of its own (about a second beside jax), while something else goes on."""
    threading.Thread(target=_grain, name="forerun-preload", daemon=True).start()


@dataclass(frozen=True)
class _End:
    """No more items: the last was given, or `error` came, or feeders were `lost`."""

    error: BaseException | None = None
    lost: bool = False


class Feed(Generic[H, P]):
    """Yields place(source.batch_at(step)) for the steps `start` .. `stop - 1`, in order.

    Args:
      feeders: processes that build batches, each every n-th of them; 0: a thread of this process.
      ahead: placed batches that wait for their step. As many again wait on the host (for each feeder).

    `waited_seconds` is how long the consumer was blocked so far; `restarts` is how often dead feeders were replaced,
    which changes nothing in the order. An exception of `batch_at` or `place` is raised in its turn and ends the feed.
    """

    def __init__(
        self,
        source: Source[H],
        place: Callable[[H], P],
        start: int,
        stop: int,
        *,
        feeders: int = 0,
        ahead: int = 2,
    ) -> None:
        if ahead < 1 or feeders < 0:
            raise ValueError(f"ahead={ahead}: at least 1; feeders={feeders}: at least 0")
        self.waited_seconds = 0.0
        self.restarts = 0
        self._due, self._stop, self._in_a_row = start, stop, 0
        self._closed = self._ended = False
        self._begin: Callable[[int], _Line[H, P]] = lambda due: _Line(source, place, due, stop, feeders, ahead)
        self._line = self._begin(start)

    @property
    def feeders(self) -> list[int]:
        """The ids of the processes that build batches now."""
        return [process.pid for process in self._line.processes if process.pid and process.exitcode is None]

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        if self._closed:
            raise RuntimeError("the feed is closed")
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        try:
            item = self._line.take()
            while isinstance(item, _End) and item.lost:
                self._restart()
                item = self._line.take()
        finally:
            self.waited_seconds += time.perf_counter() - began
        if isinstance(item, _End):
            self._ended = True
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._due, self._in_a_row = self._due + 1, 0
        return item

    def close(self) -> None:
        """End threads and processes and wait until they have gone (a running `batch_at` of a thread is finished)."""
        self._closed = True
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _restart(self) -> None:
        code = self._line.exit_code()
        self._line.close()
        if self._in_a_row == RESTARTS:
            self._ended = True
            raise _hopeless(self._due, code)
        self.restarts, self._in_a_row = self.restarts + 1, self._in_a_row + 1
        self._line = self._begin(self._due)


class _Line(Generic[H, P]):
    """One Grain pipeline from step `start` on, with its threads, its processes and what it has ready."""

    def __init__(
        self, source: Source[H], place: Callable[[H], P], start: int, stop: int, feeders: int, ahead: int
    ) -> None:
        self.processes: list[BaseProcess] = []
        self._steps: Steps[H] = Steps(source, start, stop, apart=feeders > 0)
        self._place, self._feeders, self._ahead, self._count = place, feeders, ahead, stop - start
        self._ready: queue.SimpleQueue[P | _End] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = False
        self._dead_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="forerun-feed", daemon=True)
        self._thread.start()

    def take(self) -> P | _End:
        while True:
            try:
                item = self._ready.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._silent():
                    return _End(lost=True)
                continue
            self._room.release()
            return item

    def exit_code(self) -> int | None:
        """Of a feeder that died; a negative one is a signal."""
        return next((process.exitcode for process in self.processes if process.exitcode), None)

    def close(self) -> None:
        self._closed = True
        self._room.release()
        if not self._feeders:
            self._thread.join()
            return
        self._thread.join(0 if pressed() else GRACE_SECONDS)  # after Ctrl-C, the time is for the save
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        self._thread.join(GRACE_SECONDS)
        for process in self.processes:
            process.join(GRACE_SECONDS)

    def _silent(self) -> bool:
        """A feeder has been dead for a while and Grain has not said so.

        It waits for ever for one that left with code 0, unless that is made to look like a failure.
        """
        dead: list[Any] = [process for process in self.processes if process.exitcode is not None]
        if not dead:
            return False
        for process in dead:
            process._popen.returncode = process._popen.returncode or QUIET
        self._dead_since = self._dead_since or time.monotonic()
        return time.monotonic() - self._dead_since > PATIENCE_SECONDS

    def _run(self) -> None:
        iterator, builders = None, set[threading.Thread]()
        try:
            with cleanup(_kill_children):
                if self._feeders:
                    _start_quiet_tracker()  # first, because it unblocks SIGINT
                with children_without_ctrl_c():
                    iterator = self._started(builders)
                self._carry(iterator)
        except BaseException as error:
            self._ready.put(_End(error))
        finally:
            if iterator is not None:
                iterator.close()
            for builder in builders:
                builder.join()

    def _carry(self, iterator: Iterator[H | Failure]) -> None:
        for _ in range(self._count):
            self._room.acquire()
            if self._closed:
                return
            try:
                item = next(iterator)
            except Exception as error:
                self._ready.put(_End(error, lost=self.exit_code() is not None))
                return
            if isinstance(item, Failure):
                raise item.error()
            self._ready.put(self._place(_owned(item) if self._feeders else item))
        self._ready.put(_End())

    def _started(self, builders: set[threading.Thread]) -> Any:
        """The pipeline's iterator, its processes started and known."""
        grain = _grain()

        def noted(batch: H) -> H:
            builders.add(threading.current_thread())
            return batch

        steps = grain.MapDataset.source(self._steps)
        if not self._feeders:
            read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._ahead)
            return iter(steps.map(noted).to_iter_dataset(read))
        read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        several = grain.MultiprocessingOptions(num_workers=self._feeders, per_worker_buffer_size=self._ahead)
        iterator = iter(steps.to_iter_dataset(read).mp_prefetch(several, worker_init_fn=behave))
        with _starting:
            before = set(multiprocessing.active_children())
            iterator.get_state()  # makes the iterators that start_prefetch starts
            iterator.start_prefetch()
            patience = time.monotonic() + GRACE_SECONDS
            while len(self.processes) < self._feeders and time.monotonic() < patience:
                time.sleep(0.002)
                self.processes = [process for process in multiprocessing.active_children() if process not in before]
        return iterator


def _kill_children() -> None:
    """End the feeders before this process: one that is still starting would answer its end with a traceback."""
    for process in multiprocessing.active_children():
        process.kill()


def _start_quiet_tracker() -> None:
    """Start the process that removes shared memory after this one has ended, without its warning about it.

    After Ctrl-C or a kill that memory is always left over, and the user cannot do anything about the warning.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _grain() -> Any:
    """Grain, which wants the command line's flags read before it starts a process."""
    flags: Any = importlib.import_module("absl.flags").FLAGS
    grain = importlib.import_module("grain")
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return grain


def _owned(batch: H) -> H:
    """Copied out of the memory shared with the feeder, which is given back at once: /dev/shm is small in containers."""
    import jax
    import numpy as np

    copied: H = jax.tree.map(np.array, batch)
    return copied


def _hopeless(step: int, code: int | None) -> UserError:
    causes = {
        -signal.SIGKILL: "most often the kernel, because memory ran out (see dmesg)",
        -signal.SIGBUS: "most often /dev/shm is full (df -h /dev/shm; docker run --shm-size=4g)",
    }
    if code and code < 0:
        how = f"it was killed by signal {-code} ({signal.Signals(-code).name})"
        cause = causes.get(code, "a crash in native code")
    else:
        how, cause = f"it left with exit code {(code or 0) % QUIET}", "its own message is above"
    return UserError(
        f"step {step}: a process that builds batches died {RESTARTS + 1} times in a row",
        why=f"{how}: {cause}",
        fix="data.feeders=0 builds the batches in the trainer; or fewer feeders, or a smaller batch",
    )
