"""At which steps a run saves. All hosts save at the same steps: the first host decides and tells the others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from forerun.checkpoint import hosts
from forerun.config.schema import Job
from forerun.loop.pace import RECENT
from forerun.plan.money import ASSUMPTIONS
from forerun.plan.save_interval import WASTE, aligned, best_interval, lost_share
from forerun.program.build import Program
from forerun.units import Bytes, Seconds

MEASURED = 5  # steps before the first decision
SMALL_BYTES_PER_SECOND = 1e8  # a small state pauses the run for less than the assumed second
WORTH_SECONDS = 60  # less waste than this in the whole run is not worth a warning
BETWEEN_SECONDS = 3600 / ASSUMPTIONS.preemptions_per_hour


class Saving:
    """Decides when a checkpoint is due.

    With a number in `checkpoint.every`, at its multiples. With `auto`, the interval follows from the measured time of a
    step and of the last save, and from estimates before the first save. The last step is always saved.
    """

    def __init__(
        self,
        job: Job,
        program: Program,
        first: int,
        last: int,
        say: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._job, self._first, self._last, self._say, self._warn = job, first, last, say, warn
        self._saved = first
        self._next: float = math.inf  # of auto: not before the first decision
        self._every: int | None = None  # of auto, as it was reported
        self._bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.saved(program.state)))
        share = self._bytes / hosts.part()[1]
        self._pause = min(ASSUMPTIONS.save_pause_seconds, self._bytes / SMALL_BYTES_PER_SECOND)
        self._write = share / ASSUMPTIONS.bucket_bytes_per_second
        self._measured = 0  # saves
        self._warned = False

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint."""
        return self._saved

    def due(self, step: int) -> bool:
        every, also = self._job.checkpoint.every, self._job.checkpoint.keep_every
        if step == self._last:
            return True
        if every != "auto":
            return step // every > self._saved // every
        return step >= self._next or (also is not None and step // also > self._saved // also)

    def replaces(self, step: int) -> bool:
        """Return whether a checkpoint that was saved before its evaluation is saved again with its result."""
        every = self._job.checkpoint.every
        regular = self._job.checkpoint.keep_best > 0 if every == "auto" else step % every == 0
        return regular or step == self._last

    @contextmanager
    def timed(self, step: int, written_seconds: Callable[[], float | None]) -> Iterator[None]:
        """Measure a save of `step`. `written_seconds` is that of the save before, which has ended by then."""
        began = time.perf_counter()
        yield
        # A save waits for the one before to be written. That is no part of the pause of a save at the right time.
        pause = time.perf_counter() - began
        self._pause = pause if not self._measured else min(self._pause, pause)
        self._measured += 1
        if (written := written_seconds()) is not None:
            self._write = max(0.0, written - self._pause)
        self._saved = step

    def after(self, step: int, times: Sequence[float]) -> None:
        """Call after each step, on every host alike. Decides after the first steps and after each save.

        Args:
          times: seconds of the steps so far. Those of the first host count.
        """
        decides = step == self._first + MEASURED or (step == self._saved > self._first + MEASURED)
        if not decides or step >= self._last or not times:
            return
        step_seconds = statistics.median(times[1:][-RECENT:] or times)
        if self._job.checkpoint.every != "auto":
            self._judge(step, step_seconds)
            return
        every = from_first(f"forerun/saves/{step}", self._decide(step_seconds))
        if self._every is None or not 0.5 < every / self._every < 2:
            self._report(step, every, step_seconds)
        self._next = self._saved + every
        if self._next <= step:  # the first steps took longer than an interval
            self._next = step + 1
        self._next = self._on_evaluation(self._next)

    def _times(self) -> dict[str, float]:
        return {"pause_seconds": self._pause, "write_seconds": self._write, "between_seconds": BETWEEN_SECONDS}

    def _decide(self, step_seconds: float) -> int:
        return rounded(best_interval(self._last, step_seconds, **self._times()))

    def _on_evaluation(self, step: float) -> int:
        whole = aligned(self._job, 1)
        return -(-int(step) // whole) * whole

    def _report(self, step: int, every: int, step_seconds: float) -> None:
        self._every = every
        what = f"every {every} steps" if step + every < self._last else "at the last step"
        known = "took" if self._measured else "is estimated to take"
        self._say(
            f"checkpoint {what}: a step takes {Seconds(step_seconds)}, a save of {Bytes(self._bytes)} {known} "
            f"{Seconds(self._pause)} of the run and {Seconds(self._write)} in the background"
        )

    def _judge(self, step: int, step_seconds: float) -> None:
        """Warn once if the job's own number loses much more time than the best one, by measured saves."""
        every: Any = self._job.checkpoint.every
        if self._warned or not self._measured:
            return
        best = best_interval(self._last, step_seconds, **self._times())
        waste = lost_share(every, step_seconds, **self._times()) - lost_share(best, step_seconds, **self._times())
        if waste > WASTE and waste * (self._last - step) * step_seconds > WORTH_SECONDS:
            self._warned = True
            self._warn(
                f"checkpoint.every={every} costs {waste:.0%} more time than checkpoint.every={best} (or auto): "
                f"a step takes {Seconds(step_seconds)}, a save {Seconds(self._pause)} of the run and "
                f"{Seconds(self._write)} in the background"
            )


def rounded(every: int) -> int:
    """Return two significant digits: the measured times have no more."""
    scale = 10 ** max(0, len(str(every)) - 2)
    return round(every / scale) * scale


def from_first(key: str, number: int) -> int:
    """Return the first host's number on every host.

    By the coordinator and not by a collective, because nothing is compiled between steps.
    """
    if not hosts.several():
        return number
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if hosts.is_first():
        client.key_value_set(key, str(number))
        return number
    return int(client.blocking_key_value_get(key, 600_000))
