"""Checkpoints during a run: when they are saved and what their records contain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.checkpoint.parts import Attach
from forerun.checkpoint.store import CheckpointStore, Retention
from forerun.data.order.ledger import Ledger
from forerun.program.build import Program
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.guard import DivergenceGuard
from forerun.run.hooks import Hook
from forerun.run.replicas import ReplicaCheck
from forerun.run.save_schedule import SaveSchedule
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.stored_files import StoredFiles, record_of
from forerun.supervise.worker import Worker
from forerun.track.metrics import MetricsLog
from forerun.track.run_times import RunTimes


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
        store: CheckpointStore,
        schedule: SaveSchedule,
        records: CheckpointRecords,
        replica_check: ReplicaCheck,
        program: Program,
        worker: Worker,
        times: RunTimes,
        first: int,
    ) -> None:
        self._store, self._schedule, self._records = store, schedule, records
        self._replica_check, self._program, self._worker, self._times = replica_check, program, worker, times
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
