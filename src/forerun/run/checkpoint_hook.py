"""Checkpoints during a run: the hook that saves them, what their records contain, and the schedule of saves."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from forerun.checkpoint import hosts
from forerun.checkpoint.parts import Attach
from forerun.checkpoint.store import CheckpointStore, Retention
from forerun.data.order.ledger import Ledger
from forerun.planner.cost.job_cost import ASSUMPTIONS, WASTE, aligned, best_interval, lost_share
from forerun.program.build import Program
from forerun.program.state import State
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.guard import DivergenceGuard
from forerun.run.hooks import Hook, RunSession
from forerun.run.replicas import ReplicaCheck
from forerun.run.throughput import RECENT, Throughput
from forerun.run.validation import Validation
from forerun.run_folder.stored_files import StoredFiles, record_of
from forerun.supervise.worker import Worker
from forerun.track.metrics import MetricsLog
from forerun.units import Bytes, Seconds

MEASURED = 5  # steps before the first decision
SMALL_BYTES_PER_SECOND = 1e8  # a small state pauses the run for less time than the assumed second
WORTH_SECONDS = 60  # if the rest of the run wastes less than this, there is no warning
BETWEEN_SECONDS = 3600 / ASSUMPTIONS.preemptions_per_hour


@dataclass(frozen=True, kw_only=True)
class CheckpointRecords:
    """Builds the records of a run's checkpoints.

    Args:
      constant: the entries that are the same in all checkpoints of the run.
      metrics_log, ledger: the run's open files on the host that writes them, None on the others.
      stored_files: stores copies of these files with checkpoints that are outside of the run's folder. None if the
        checkpoints are inside.
    """

    resolved: ResolvedJob
    constant: Mapping[str, Any]
    guard: DivergenceGuard
    validation: Validation
    throughput: Throughput
    metrics_log: MetricsLog | None
    ledger: Ledger | None
    stored_files: StoredFiles | None

    def build(self, step: int) -> tuple[dict[str, Any], Attach | None]:
        """Flush the run's files, and return the record for the checkpoint of `step`.

        The second value stores copies of the run's files during the save. It is None if none are stored.
        """
        files = record_of(self.resolved.job, step, self.guard.skips.known, self.metrics_log, self.ledger)
        record = {**self.constant, **self.validation.record(step, self.throughput.loss), **files}
        if self.stored_files is None:
            return record, None
        return record | self.stored_files.record(step), self.stored_files.attach()


class CheckpointHook(Hook):
    """Saves checkpoints when they are due, when the run ends early, and after a stop if the grace time allows it.

    Args:
      first: the step that the run resumes from, or 0.
    """

    def __init__(
        self,
        session: RunSession,
        store: CheckpointStore,
        schedule: SaveSchedule,
        records: CheckpointRecords,
        replica_check: ReplicaCheck,
        program: Program,
        first: int,
    ) -> None:
        self._store, self._schedule, self._records = store, schedule, records
        self._replica_check, self._program, self._worker = replica_check, program, session.worker
        self._times = session.times
        self._guard, self._validation, self._throughput = records.guard, records.validation, records.throughput
        # An earlier process saved this checkpoint, and stopped before the evaluation that belongs to it.
        self._lacks_loss = self._validation.is_pending(first) and schedule.replaces(first)

    def on_start(self, step: int, state: State) -> None:
        """Save the checkpoint that the run resumes from again, if it lacks the result of its evaluation."""
        if self._lacks_loss:
            self._save(step, state)

    def on_dispatch(self, step: int, state: State) -> None:
        """Raise the error of a background save, if there was one, and report the time of a finished save."""
        self._store.check()
        report_save_time(self._store, self._worker)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due: on schedule, or because the validation hook ended the run early."""
        return self._schedule.is_due(step) or self._validation.is_exhausted

    def on_step(self, step: int, state: State) -> None:
        # While steps are being skipped, the weights may be the cause, so they are not saved. The schedule then reports
        # the save as due again after the next step.
        if self._guard.trusts_state or step == self._throughput.last:
            self._save(step, state)

    def after_step(self, step: int) -> None:
        self._schedule.update(step, self._throughput.step_seconds)

    def on_stop(self, step: int, state: State) -> None:
        """Save after an announced stop if the grace time allows it, and wait for the save that is in progress."""
        is_unsaved = self._schedule.last_saved < step < self._throughput.last
        if is_unsaved and self._guard.trusts_state and self._worker.stop.save:
            self._save(step, state)
        with self._times.spent("saves"):
            self._store.wait(self._worker.stop.remaining_seconds())

    def _save(self, step: int, state: State) -> None:
        """Start a save. The replicas are compared first, so that no checkpoint contains a corrupt state."""
        began = time.perf_counter()
        with self._times.spent("saves"), self._schedule.measure(step, lambda: self._store.save_seconds):
            self._replica_check.record(step, state)
            self._replica_check.require_equal(step)
            self._times.mark(step, is_forced=True)  # the checkpoint's copy of the events ends with the saved step
            record, attach = self._records.build(step)
            self._store.save(step, self._program.saved(state), record, attach)
        self._times.saved(step, time.perf_counter() - began)


def report_save_time(store: CheckpointStore, worker: Worker) -> None:
    """Send the time of the newest committed save to the supervisor, once per save.

    The leader uses it to decide whether the grace time of a stop is long enough for a save. Only the main thread may
    call this function.
    """
    seconds = store.save_seconds
    if seconds is not None and seconds != worker.stop.save_seconds:
        worker.pulse.saved(seconds)


def retention_of(resolved: ResolvedJob) -> Retention:
    """Return the rule of the job for which checkpoints are kept."""
    rules = resolved.job.checkpoint
    return Retention(rules.keep, rules.keep_every, rules.keep_best)


class SaveReporter(Reporter):
    """Reports problems of a save to the user, and to the supervisor as progress.

    Without the second, the supervisor would take a long wait for a bucket for a stall.
    """

    def __init__(self, reporter: Reporter, worker: Worker) -> None:
        self._reporter, self._worker = reporter, worker

    def warn(self, text: str) -> None:
        self._worker.pulse.phase("save")
        self._reporter.warn(text)


# ---- The steps at which a run saves: all hosts save at the same steps, because the first host decides for all ----


class SaveSchedule:
    """Decides when a checkpoint is due.

    If `checkpoint.every` is a number, its multiples are due. If it is `auto`, the interval follows from the measured
    time of a step and of a save. Before the first save, its time is estimated. The last step is always saved.

    Args:
      first: the step that the run resumes from, or 0.
      last: the last step of the run.
      reporter: receives messages about the chosen interval, and a warning about a wasteful one.
    """

    def __init__(
        self,
        resolved: ResolvedJob,
        program: Program,
        first: int,
        last: int,
        reporter: Reporter = SILENT,
    ) -> None:
        self._job, self._first, self._last, self._reporter = resolved.job, first, last, reporter
        self._saved = first
        self._next: float = math.inf  # next step to save under `auto`; no save before the first decision
        self._every: int | None = None  # interval under `auto` that was reported last
        self._bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.saved(program.state)))
        share = self._bytes / hosts.part()[1]
        self._pause = min(ASSUMPTIONS.save_pause_seconds, self._bytes / SMALL_BYTES_PER_SECOND)
        self._write = share / ASSUMPTIONS.bucket_bytes_per_second
        self._measured = 0  # number of measured saves
        self._warned = False

    @property
    def last_saved(self) -> int:
        """Return the step of the newest checkpoint."""
        return self._saved

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        every, also = self._job.checkpoint.every, self._job.checkpoint.keep_every
        if step == self._last:
            return True
        if every != "auto":
            return step // every > self._saved // every
        return step >= self._next or (also is not None and step // also > self._saved // also)

    def replaces(self, step: int) -> bool:
        """Return whether a checkpoint that lacks the result of its evaluation must be saved again with it."""
        every = self._job.checkpoint.every
        regular = self._job.checkpoint.keep_best > 0 if every == "auto" else step % every == 0
        return regular or step == self._last

    @contextmanager
    def measure(self, step: int, written_seconds: Callable[[], float | None]) -> Iterator[None]:
        """Measure the save of `step` inside the block.

        Args:
          step: the step that is saved.
          written_seconds: returns the total time of the previous save, which has ended when the block ends.
        """
        began = time.perf_counter()
        yield
        # A save also waits until the previous one is written. The minimum over all saves excludes that time.
        pause = time.perf_counter() - began
        self._pause = pause if not self._measured else min(self._pause, pause)
        self._measured += 1
        if (written := written_seconds()) is not None:
            self._write = max(0.0, written - self._pause)
        self._saved = step

    def update(self, step: int, times: Sequence[float]) -> None:
        """Choose the interval again, after the first steps and after each save. All hosts call this after each step.

        Args:
          step: the step that was dispatched last.
          times: seconds of the steps so far. Only the first host's times are used.
        """
        decides = step == self._first + MEASURED or (step == self._saved > self._first + MEASURED)
        if not decides or step >= self._last or not times:
            return
        step_seconds = statistics.median(times[1:][-RECENT:] or times)
        if self._job.checkpoint.every != "auto":
            self._judge(step, step_seconds)
            return
        every = from_first(f"forerun/saves/{step}", rounded(best_interval(self._last, step_seconds, **self._times())))
        if self._every is None or not 0.5 < every / self._every < 2:
            self._report(step, every, step_seconds)
        self._next = self._saved + every
        if self._next <= step:  # the first steps took longer than an interval
            self._next = step + 1
        self._next = self._on_evaluation(self._next)

    def _times(self) -> dict[str, float]:
        return {"pause_seconds": self._pause, "write_seconds": self._write, "between_seconds": BETWEEN_SECONDS}

    def _on_evaluation(self, step: float) -> int:
        """Return `step`, rounded up to the next evaluation if the best checkpoints are kept."""
        multiple = aligned(self._job, 1)
        return -(-int(step) // multiple) * multiple

    def _report(self, step: int, every: int, step_seconds: float) -> None:
        self._every = every
        what = f"every {every} steps" if step + every < self._last else "at the last step"
        known = "took" if self._measured else "is estimated to take"
        self._reporter.info(
            f"checkpoint {what}: a step takes {Seconds(step_seconds)}, a save of {Bytes(self._bytes)} {known} "
            f"{Seconds(self._pause)} of the run and {Seconds(self._write)} in the background"
        )

    def _judge(self, step: int, step_seconds: float) -> None:
        """Warn once if the job's interval wastes much more time than the best one. Needs a measured save."""
        every: Any = self._job.checkpoint.every
        if self._warned or not self._measured:
            return
        best = best_interval(self._last, step_seconds, **self._times())
        waste = lost_share(every, step_seconds, **self._times()) - lost_share(best, step_seconds, **self._times())
        if waste > WASTE and waste * (self._last - step) * step_seconds > WORTH_SECONDS:
            self._warned = True
            self._reporter.warn(
                f"checkpoint.every={every} costs {waste:.0%} more time than checkpoint.every={best} (or auto): "
                f"a step takes {Seconds(step_seconds)}, a save {Seconds(self._pause)} of the run and "
                f"{Seconds(self._write)} in the background"
            )


def rounded(every: int) -> int:
    """Return `every`, rounded to two significant digits. The measured times are not more precise."""
    scale = 10 ** max(0, len(str(every)) - 2)
    return round(every / scale) * scale


def from_first(key: str, number: int) -> int:
    """Return the first host's `number` on all hosts.

    JAX's coordinator distributes it. A collective operation would have to be compiled between steps.
    """
    if not hosts.several():
        return number
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if hosts.is_first():
        client.key_value_set(key, str(number))
        return number
    return int(client.blocking_key_value_get(key, 600_000))
