"""Warnings about a job, printed by every command that reads one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.config.schema import Job


def print_warnings(job: Job) -> None:
    """Print what is probably a mistake in the job, apart from what the command writes to stdout."""
    from forerun.inputs.job_warnings import warnings_of

    for text in warnings_of(job):
        print(f"warning: {text}", file=sys.stderr, flush=True)
