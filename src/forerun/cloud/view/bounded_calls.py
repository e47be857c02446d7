"""Concurrent calls with a limit of their time, for buckets that may never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def bounded_calls(call: Callable[[K], V], arguments: Iterable[K], seconds: float, concurrent: int = 8) -> dict[K, V]:
    """Return the results of `call` by its argument, without the calls that have not ended after `seconds`.

    The threads are daemons: unlike those of an executor, they do not delay the exit of the process. `call` must not
    raise an error; a call that does is absent from the result.
    """
    waiting: SimpleQueue[K] = SimpleQueue()
    for argument in dict.fromkeys(arguments):
        waiting.put(argument)
    results: dict[K, V] = {}
    is_late = threading.Event()

    def work() -> None:
        while not is_late.is_set():
            try:
                argument = waiting.get_nowait()
            except Empty:
                return
            results[argument] = call(argument)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrent, waiting.qsize()))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    is_late.set()
    return dict(results)
