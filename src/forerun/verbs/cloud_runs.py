"""Cloud runs: what exists and costs money, and the download of results. The command line starts and stops runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.cloud.view.run_rows import CloudRow


def cloud_resources(project: str | None = None) -> tuple[CloudRow, ...]:
    """List the cloud resources that forerun created: slices with their state, step, cost, cap and deadline.

    It is the list of `forerun ps`. Nothing is changed. `fr.Table(dataclasses.asdict(row) for row in rows)` is a table.

    Args:
      project: Google Cloud project (default: that of the environment or of your login)

    Raises:
      UserError: An API cannot be asked, so that the list would be incomplete.
    """
    from forerun.cloud.providers import all_providers
    from forerun.cloud.view.project_state import read_project
    from forerun.cloud.view.run_location import known_runs
    from forerun.cloud.view.run_rows import rows_of

    found = read_project(lambda: all_providers(project), known_runs(), time.time())
    if found.errors:
        raise found.errors[0]
    return rows_of(found.resources, found.snapshots, found.now)


def fetch_run(name: str, to: str | os.PathLike[str] | None = None, project: str | None = None) -> Path:
    """Download the results of a finished cloud run, compare their checksums, and return their folder.

    Args:
      name: name of the run, or the address of its bucket folder, such as gs://bucket/runs/a
      to: folder to write (default: runs/NAME)
      project: Google Cloud project (default: that of the environment or of your login)

    Raises:
      UserError: There is no such run, it has not finished, or a file exists with other content.
    """
    from forerun.cloud.providers import all_providers
    from forerun.cloud.view.download import fetch_results
    from forerun.cloud.view.run_location import find_run

    files = find_run(name, lambda: all_providers(project))
    return fetch_results(files, None if to is None else Path(to)).folder
