"""`check`: every value of a job, where it came from, and what follows from it on a device."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.config.load import LoadedJob, origins_of
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.verbs.check.values import (
    Group,
    derived_rows,
    derived_values,
    job_groups,
    model_values,
    outcome_of,
    place_here,
    place_on,
)
from forerun.verbs.job_files import open_job, prepared
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from forerun.models.model_facts import ModelOutline


@dataclass(frozen=True)
class JobReport:
    """The values of a job and what follows from them.

    Attributes:
      job: the job.
      groups: the sections of the job, and last the derived values. Each has a title and rows of name, value and origin.
      error: why nothing could be derived, or None. `check` raises it; the command line prints the values first.
    """

    job: Job
    groups: tuple[Group, ...]
    error: UserError | None = None

    @property
    def derived(self) -> dict[str, str]:
        """The derived values by name: parameters, devices, micro batch, attention kernel and others."""
        return {} if self.error else {row.name: row.value for row in self.groups[-1].rows}

    @property
    def table(self) -> Table:
        """All values as a table with the columns section, name, value and origin."""
        return Table(
            {"section": group.title, "name": row.name, "value": row.value, "origin": row.origin}
            for group in self.groups
            for row in group.rows
        )

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        from forerun.pages.render import render

        return render("job_values.html.jinja", name=self.job.name, groups=self.groups)


def check(job: Job | str | os.PathLike[str], *, on: str | None = None) -> JobReport:
    """Check a job without running it, and derive what follows from it.

    Args:
      job: a job, or the path of a job file.
      on: a slice such as `"v5e-8"`; default: the devices of this machine.

    Returns:
      The values of the job with their origins, and the derived values: parameters, kernel, micro batch and others.

    Raises:
      UserError: The job has a mistake, or cannot run on these devices.
    """
    loaded = loaded_job(job)
    report = check_loaded(loaded, on)
    if report.error is not None:
        raise report.error
    return report


def loaded_job(job: Job | str | os.PathLike[str]) -> LoadedJob:
    """Return a job with the origins of its values, which a job that was created in Python does not have."""
    if not isinstance(job, Job):
        return open_job(job)
    from pathlib import Path

    job = prepared(job)
    return LoadedJob(job, origins_of(job), Path("job.yaml"))


def check_loaded(loaded: LoadedJob, on: str | None, base: ModelOutline | None = None) -> JobReport:
    """Return the report of a job. An error that leaves the job's own values printable is in `JobReport.error`.

    `base` is the outline of the model, if a stage before has not written it yet.
    """
    from forerun.methods.job_warnings import warnings_of
    from forerun.resolve.resolve_model import resolve_model

    reporter = LineReporter(sys.stderr)  # stdout has the result only
    slice_place = place_on(on, loaded.job) if on else None
    resolved = resolve_model(loaded.job, base)
    applied = model_values(resolved)
    for text in warnings_of(resolved):
        reporter.warn(text)
    try:
        outcome = outcome_of(resolved, slice_place or place_here(loaded.job, reporter), reporter)
    except UserError as error:
        return JobReport(loaded.job, tuple(job_groups(loaded, applied)), error)
    applied |= derived_values(loaded.job, outcome)
    derived = Group(f"derived for {outcome.place.title}", derived_rows(outcome))
    return JobReport(loaded.job, (*job_groups(loaded, applied), derived))
