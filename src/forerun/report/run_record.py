"""Everything that a run has recorded, read from its folder or from the copies beside its checkpoints.

Reading never changes the run: a run that is in progress can be read at any moment. Files that are missing or half
written count as empty.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.report.run_files import Row, read_hosts, read_lines, read_summary
from forerun.reporter import SILENT, Reporter
from forerun.run_folder.run_folder import RunFolder, newest_record, recorded_job, require_run
from forerun.run_folder.stage_folder import run_of
from forerun.storage.address import Address

EVENTS, HOSTS = "events.jsonl", "hosts.json"


@dataclass(frozen=True)
class RunRecord:
    """The records of a run.

    Attributes:
      location: the folder of the run, or the address of its checkpoints, as the user wrote it.
      job: the job of the run.
      metrics: the lines of metrics.jsonl in order of steps.
      events: the lines of events.jsonl in order of time; empty if the run could not write them.
      skips: the skipped steps and the reasons.
      summary: the content of summary.json; empty if the run has not ended.
      hosts: the content of hosts.json; empty for a run without a supervisor.
      exports: the lines of exports.jsonl.
    """

    location: str
    job: Job = field(repr=False)
    metrics: Sequence[Row] = field(repr=False)
    events: Sequence[Row] = field(repr=False, default=())
    skips: dict[int, str] = field(repr=False, default_factory=dict)
    summary: Row = field(repr=False, default_factory=dict)
    hosts: Row = field(repr=False, default_factory=dict)
    exports: Sequence[Row] = field(repr=False, default=())

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def step(self) -> int:
        """The last step that is recorded, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended: its summary exists and is not older than its metrics."""
        return bool(self.summary) and int(self.summary.get("steps") or 0) >= self.step

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) for each logged step that has a finite number for `key`."""
        return [(row["step"], row[key]) for row in self.metrics if type(row.get(key)) in (int, float)]

    def newest(self, key: str) -> float | None:
        """Return the last logged number for `key`, or None if no step has one."""
        points = self.points(key)
        return float(points[-1][1]) if points else None

    @property
    def samples(self) -> list[tuple[int, list[Row]]]:
        """The samples during training: (step, its prompts and texts)."""
        return [(row["step"], row["samples"]) for row in self.metrics if isinstance(row.get("samples"), list)]


def read_run(location: str | Path, reporter: Reporter = SILENT) -> RunRecord:
    """Return the records of a run.

    Args:
      location: the folder of a run or of a job file with stages (its last stage), or the address of a run's checkpoints
        in a bucket, such as `gs://bucket/checkpoints/NAME`. A bucket has the state of the newest checkpoint.
      reporter: receives messages about files that are damaged.

    Raises:
      UserError: the location is not a run.
    """
    if Address.of(location).is_remote:
        return _read_bucket(str(location), reporter)
    folder = RunFolder(run_of(location))
    return record_of(str(location), folder, require_run(folder, reporter))


def _read_bucket(address: str, reporter: Reporter) -> RunRecord:
    from forerun.run_folder.stored_files import restore_files  # imports jax, which folders do not need

    record = newest_record(address, reporter)
    if record is None or "job" not in record:
        raise UserError(
            "E-REPORT-001",
            f"{address} has no checkpoint of a run",
            why="the files of a run are copied to its bucket with each checkpoint",
            fix="give the folder of one run: checkpoint.folder, a slash, and the name of the job; or wait for its "
            "first checkpoint",
        )
    with tempfile.TemporaryDirectory() as copies:
        folder = RunFolder(Path(copies))
        restore_files(address, folder, SILENT)
        return record_of(address, folder, recorded_job(record["job"], folder))


def record_of(location: str, folder: RunFolder, job: Job) -> RunRecord:
    """Return the records in a folder whose job is known."""
    return RunRecord(
        location=location,
        job=job,
        metrics=[row for row in read_lines(folder.metrics) if row.get("step") is not None],
        events=read_lines(folder.path / EVENTS),
        skips=skips_of(read_lines(folder.skips)),
        summary=read_summary(folder.summary),
        hosts=read_hosts(folder.path / HOSTS),
        exports=read_lines(folder.path / "exports.jsonl"),
    )


def skips_of(rows: Iterable[Row]) -> dict[int, str]:
    """Return the reason of each skipped step. Rows without a step or a reason are omitted."""
    return {
        row["step"]: row["why"] for row in rows if isinstance(row.get("step"), int) and isinstance(row.get("why"), str)
    }
