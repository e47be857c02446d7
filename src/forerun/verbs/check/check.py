"""`check`: every value of a job, where it came from, and what follows from it on a device."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.safe_text import clean, printable, raw_stream
from forerun.verbs.check.values import (
    Group,
    Row,
    derived_rows,
    derived_values,
    job_groups,
    model_values,
    outcome_of,
    place_here,
    place_on,
)
from forerun.verbs.job_files import open_job, prepared
from forerun.verbs.option_types import Slice
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from forerun.config.load import LoadedJob
    from forerun.config.schema import Job
    from forerun.models.model_facts import ModelOutline

_WIDEST_VALUE = 20
_NARROWEST_ORIGIN = 24
_BOLD, _DIM, _CYAN, _PLAIN = "\033[1m", "\033[2m", "\033[36m", "\033[0m"


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

    def print(self, *, complete: bool = False) -> None:
        """Print the values, as wide as the terminal, and raise `error` if nothing could be derived.

        Args:
          complete: whether to print values that have their defaults, too.
        """
        groups, hidden = (list(self.groups), 0) if complete else without_defaults(self.groups)
        is_terminal = sys.stdout.isatty()
        width = min(120, os.get_terminal_size(sys.stdout.fileno()).columns) if is_terminal else None
        text = table(groups, width, colour=is_terminal and not os.environ.get("NO_COLOR"))
        print(text, file=raw_stream(sys.stdout))  # the table filters its cells
        if hidden:
            print(f"\n{hidden} more values have their defaults: --all shows them with their reasons")
        if self.error is not None:
            sys.stdout.flush()
            raise self.error

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        from forerun.pages.render import render

        return render("job_values.html.jinja", name=self.job.name, groups=self.groups)


def check(job: Job | str | os.PathLike[str], *, on: Slice | None = None) -> JobReport:
    """Check a job without running it, and derive what follows from it.

    Args:
      job: a job, or the path of a job file
      on: derive values for this slice, for example v5e-8, instead of the devices of this machine

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
    from forerun.config.load import LoadedJob, origins_of
    from forerun.config.schema import Job

    if not isinstance(job, Job):
        return open_job(job)
    job = prepared(job)
    return LoadedJob(job, origins_of(job), Path("job.yaml"))


def check_loaded(loaded: LoadedJob, on: str | None = None, base: ModelOutline | None = None) -> JobReport:
    """Return the report of a job. An error that leaves the job's own values printable is in `JobReport.error`.

    `base` is the outline of the model, if a stage before has not written it yet.
    """
    from forerun.methods.job_notes import warnings_of
    from forerun.resolve.resolve_model import resolve_model

    reporter = LineReporter(sys.stderr)  # stdout has the result only
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


# ---- The table in a terminal ----


def without_defaults(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """Return the rows that the user set or that are derived, and the number of omitted rows."""
    kept = [Group(title, [row for row in rows if _is_shown(row)]) for title, rows in groups]
    shown = sum(len(group.rows) for group in kept)
    return [group for group in kept if group.rows], sum(len(group.rows) for group in groups) - shown


def _is_shown(row: Row) -> bool:
    return row.kind != "default" or row.origin.startswith("derived:")


def table(groups: Sequence[Group], width: int | None, colour: bool) -> str:
    """Return titled groups of aligned rows. If a value is too wide for its column, its origin is on the next line."""
    groups = [Group(printable(group.title), [_printable(row) for row in group.rows]) for group in groups]
    rows = [row for group in groups for row in group.rows]
    names = max(len(row.name) for row in rows)
    values = max((len(row.value) for row in rows if len(row.value) <= _WIDEST_VALUE), default=1)
    indent = " " * (2 + names + 2 + values + 2)
    origin_width = max(_NARROWEST_ORIGIN, width - len(indent)) if width else sys.maxsize

    def painted(text: str, code: str) -> str:
        return f"{code}{text}{_PLAIN}" if colour and code else text

    def lines(row: Row) -> list[str]:
        first, *more = textwrap.wrap(row.origin, origin_width, break_long_words=False) if width else [row.origin]
        left, right = {"default": (_DIM, _DIM), "override": ("", _CYAN)}.get(row.kind, ("", _DIM))
        head = f"  {row.name:<{names}}  {row.value:<{values}}  "
        start = [painted(head, left) + painted(first, right)]
        if len(head) > len(indent):
            start = [painted(head.rstrip(), left), indent + painted(first, right)]
        return start + [indent + painted(text, right) for text in more]

    return "\n\n".join(
        "\n".join([painted(group.title, _BOLD), *(line for row in group.rows for line in lines(row))])
        for group in groups
    )


def _printable(row: Row) -> Row:
    return row._replace(name=clean(row.name), value=clean(row.value), origin=clean(row.origin))
