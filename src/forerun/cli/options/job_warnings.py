"""Warnings about a job, printed by every command that reads one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.resolve.resolved_job import ResolvedJob


def print_warnings(resolved: ResolvedJob) -> None:
    """Print what is probably a mistake in the job, apart from what the command writes to stdout."""
    from forerun.methods.job_notes import warnings_of

    for text in warnings_of(resolved):
        print(f"warning: {text}", file=sys.stderr, flush=True)
