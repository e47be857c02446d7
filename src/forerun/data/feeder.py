"""What runs where batches are built: Grain's view of the steps, and a feeder process's manners.

Everything here is sent to feeder processes through a local pipe; a source that maps files sends their names.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any, Generic, Protocol, TypeVar

H_co = TypeVar("H_co", covariant=True)


class Source(Protocol[H_co]):
    """Batch `step`, counted from 0, as NumPy arrays: a pure function."""

    def batch_at(self, step: int, /) -> H_co: ...


class Failure:
    """An exception that travels as an element, so that it comes out in its turn and with its type."""

    def __init__(self, error: BaseException) -> None:
        self.trace = "".join(traceback.format_exception(error))
        self.kind: type[BaseException] = type(error)
        self.args, self.state = error.args, dict(error.__dict__)
        try:
            pickle.loads(pickle.dumps(self))
        except Exception:  # a class or a value that cannot travel
            self.kind, self.args, self.state = RuntimeError, (f"{type(error).__name__}: {error}",), {}

    def error(self) -> BaseException:
        """The same again. `__init__` may want other arguments than `args`, so it is not called."""
        error = self.kind.__new__(self.kind, *self.args)
        error.__dict__.update(self.state)
        error.add_note(f"raised in a feeder process:\n{self.trace}")
        return error


class Steps(Generic[H_co]):
    """Batches `start` .. `stop - 1` as Grain reads them: by index, from 0, and without an end.

    After the last batch there is nothing, over and over: a StopIteration that Grain has read ahead keeps its shared
    memory alive, and a feeder that has left by itself could not be told from one that died.
    """

    def __init__(self, source: Source[H_co], start: int, stop: int, *, apart: bool) -> None:
        self._source, self._start, self._stop, self._apart = source, start, stop, apart

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> H_co | Failure | str:
        step = self._start + index
        if step >= self._stop:
            return "nothing"
        if not self._apart:
            return self._source.batch_at(step)
        try:
            return self._source.batch_at(step)
        except BaseException as error:  # SystemExit too: Grain would wait for ever for a worker that left with code 0
            return Failure(error)

    def __repr__(self) -> str:
        return f"Steps({self._start}..{self._stop - 1})"


def behave(index: int, count: int) -> None:
    """First thing in a feeder process: no accelerator, no Ctrl-C of its own, no life after its trainer."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax: Any = sys.modules.get("jax")  # Grain imports it if it is installed
    if jax is not None:
        jax.config.update("jax_platforms", "cpu")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="forerun-parent", daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
