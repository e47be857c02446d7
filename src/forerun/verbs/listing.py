"""Listing the runs of a folder."""

from __future__ import annotations

import os

from forerun.watch.run_list import RunEntry, list_runs


def runs(folder: str | os.PathLike[str] = "runs") -> tuple[RunEntry, ...]:
    """List the runs of a folder with their state and newest values, those with the newest news first.

    A run that cannot be read has the state `broken` and the reason in `detail`. Nothing is changed.
    `fr.Table(dataclasses.asdict(run) for run in fr.runs())` is a table of the list.

    Args:
      folder: the folder of runs, or the `checkpoint.folder` of runs in a bucket.

    Raises:
      UserError: The folder does not exist.
    """
    return list_runs(os.fspath(folder))
