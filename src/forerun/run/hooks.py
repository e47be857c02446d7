"""Hooks of the training loop: validation, progress, ledger and metrics.

`forerun.run.steps` calls the hooks of a run in a fixed order, at the events that `Hook` lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.data.feed import Feed
from forerun.data.order.ledger import Ledger
from forerun.data.read_ahead import StepSource
from forerun.data.reads.store_reads import StoreReads
from forerun.program.state import Metrics, State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.extension import Extension
from forerun.run.step_range import StepRange
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.supervise.worker import Worker
from forerun.track.metrics import MetricsLog
from forerun.track.run_times import RunTimes


@dataclass(frozen=True)
class RunSession:
    """What all phases of a run in this process share.

    Args:
      resolved: the job. Its steps may be open until the data was read.
      reporter: shows phases, warnings and progress to the user.
      worker: connects the run to its supervisor.
      times: records the times of the phases.
      profile: the steps to record with the profiler, or None.
    """

    resolved: ResolvedJob
    reporter: Reporter
    worker: Worker
    times: RunTimes = field(default_factory=RunTimes)
    profile: StepRange | None = None

    def phase(self, name: str) -> None:
        """Report the start of a phase to the supervisor and to the record of times."""
        self.worker.pulse.phase(name)
        self.times.phase(name)


@dataclass(frozen=True)
class FinishedStep:
    """A step whose outcome is final: taken, taken at a later try, or skipped.

    Args:
      step: its number; the first step of a run is 1.
      metrics: its metrics on the host, or None if the step was skipped.
      rejection: why the device rejected its first try, or None if it did not.
      allowed: whether it is a spike that was taken, because the step before it was skipped for a spike too.
    """

    step: int
    metrics: Metrics | None
    rejection: str | None = None
    allowed: bool = False

    @property
    def skip_reason(self) -> str | None:
        """Return why the step was skipped, or None if it was taken."""
        return self.rejection if self.metrics is None else None

    @property
    def warning(self) -> str | None:
        """Return a message for the user if the first try was rejected, else None."""
        if self.rejection is None:
            return None
        if self.metrics is None:
            return f"step {self.step}: {self.rejection}, twice; its batch is skipped, the weights are unchanged"
        if self.allowed:
            return f"step {self.step}: {self.rejection} again, so the batch is not the cause: the clipped step is taken"
        return (
            f"step {self.step}: {self.rejection}; the second try succeeded, so the fault was transient, "
            "most likely in the hardware"
        )

    def metrics_row(self) -> dict[str, Any]:
        """Return what metrics.jsonl records about a rejected first try, or an empty row if there was none."""
        if self.rejection is None:
            return {}
        outcome = "skipped" if self.metrics is None else "allowed" if self.allowed else "replayed"
        return {outcome: self.rejection}


class Hook:
    """The base class of hooks. A hook overrides the events that it needs.

    The first event of a run is `on_start`. Each step then has these events: `on_dispatch`, `on_finish` (of this step or
    of earlier ones), `on_step` if it is due, and `after_step`. The last event is `on_stop`, unless an exception ends
    the run.
    """

    def on_start(self, step: int, state: State) -> None:
        """Act before the first step. `step` is the last one that an earlier process finished, or 0."""

    def on_dispatch(self, step: int, state: State) -> None:
        """Act while the devices compute the step.

        `state` is the result of the step, which may not exist yet. A hook may dispatch work that reads it, but must not
        wait for it. The next step reuses its buffers.
        """

    def on_finish(self, finished: FinishedStep) -> None:
        """Act on the metrics of a step. The devices usually compute the next step already."""

    def is_due(self, step: int) -> bool:
        """Return whether `on_step` must be called after this step.

        If any hook is due, the loop waits for the step. It calls `is_due` again after the hooks before this one have
        acted, because they may change the answer.
        """
        return False

    def on_step(self, step: int, state: State) -> None:
        """Act on the state after a finished step, while no other step is in flight."""

    def after_step(self, step: int) -> None:
        """Act at the end of each step, whether or not `on_step` was called."""

    def on_stop(self, step: int, state: State) -> None:
        """Act after the last step, or after the step at which all hosts stop. No step is in flight."""


class ValidationHook(Hook):
    """Evaluates the weights on held-out documents and records the result."""

    def __init__(
        self, session: RunSession, validation: Validation, throughput: Throughput, metrics_log: MetricsLog | None
    ) -> None:
        self._session, self._validation = session, validation
        self._throughput, self._metrics_log = throughput, metrics_log

    def on_start(self, step: int, state: State) -> None:
        """Repeat the evaluation that the stop of an earlier process interrupted."""
        if self._validation.is_pending(step):
            self.on_step(step, state)

    def is_due(self, step: int) -> bool:
        return self._validation.is_due(step)

    def on_step(self, step: int, state: State) -> None:
        with self._session.times.spent("validation"):
            result = self._validation.evaluate(step, state, self._session.worker)
        if result is not None:
            if self._metrics_log is not None:
                self._metrics_log.write(step, **result.metrics_row)
            self._session.reporter.info(str(result))
        self._throughput.exclude()


class ProgressHook(Hook):
    """Reports finished steps to the supervisor. Raises `RecompileError` if something was compiled between steps."""

    def __init__(self, worker: Worker, require_no_compilation: Callable[[int], None]) -> None:
        self._worker, self._require_no_compilation = worker, require_no_compilation

    def on_finish(self, finished: FinishedStep) -> None:
        self._worker.pulse.step(finished.step)
        self._require_no_compilation(finished.step)


class LedgerHook(Hook):
    """Records the examples of each step. Only the first host has a ledger, and only if the job asks for one."""

    def __init__(self, ledger: Ledger | None, batches: StepSource) -> None:
        self._ledger, self._batches = ledger, batches

    def on_finish(self, finished: FinishedStep) -> None:
        if self._ledger is not None:
            examples = self._batches.examples_at(finished.step - 1)
            self._ledger.write(finished.step, examples, skipped=finished.skip_reason)


class MetricsHook(Hook):
    """Times the steps, and records and shows their metrics. The last step and rejected steps are always recorded.

    Args:
      metrics_log: the log on the first host, None on the others.
      feed: measures how long the run has waited for data.
      extension: the change of the number of steps since the checkpoint, if there is one.
      reads: counts the reads of stores in a bucket, and reports the first damaged block and the totals; None if there
        are none.
    """

    def __init__(
        self,
        session: RunSession,
        throughput: Throughput,
        metrics_log: MetricsLog | None,
        feed: Feed[Any, Any],
        extension: Extension | None,
        reads: StoreReads | None,
    ) -> None:
        self._reporter, self._times, self._log_every = session.reporter, session.times, session.resolved.job.log_every
        self._throughput, self._metrics_log = throughput, metrics_log
        self._feed, self._extension, self._reads = feed, extension, reads

    def on_start(self, step: int, state: State) -> None:
        if self._extension is not None and step < self._throughput.last and self._metrics_log is not None:
            # The row has the number of the next step. If a later process repeats that step, it removes the row and
            # writes it again.
            self._metrics_log.write(step + 1, **self._extension.figures)
        self._throughput.start()

    def on_finish(self, finished: FinishedStep) -> None:
        step, throughput = finished.step, self._throughput
        for text in self._reads.take_messages() if self._reads is not None else ():
            self._reporter.warn(text)
        if finished.warning:
            self._reporter.warn(finished.warning)
        self._times.finish_step(step, self._feed.waited_seconds, is_useful=finished.rejection is None)
        if finished.metrics is None:
            throughput.skip(step)
            if self._metrics_log is not None:
                self._metrics_log.write(step, **finished.metrics_row())
            return
        throughput.finish(step, finished.metrics, self._feed.waited_seconds)
        is_logged = step % self._log_every == 0 or step == throughput.last or finished.rejection
        if is_logged and self._metrics_log is not None:
            figures = {} if self._reads is None else self._reads.figures()
            row = throughput.take_metrics_row() | figures | self._times.shares() | finished.metrics_row()
            self._metrics_log.write(step, **row)
            self._times.mark(step)
        self._reporter.step(throughput.view())

    def on_stop(self, step: int, state: State) -> None:
        total = None if self._reads is None else self._reads.total()
        if total is not None:
            self._reporter.warn(total)
