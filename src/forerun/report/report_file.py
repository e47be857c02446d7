"""The file `report.html` in the folder of a run, which is written when the run ends or stops."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.report.run_record import record_of
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.units import MIB

FILE = "report.html"
# A run that is asked to stop may have only seconds left. Above this size, its metrics take longer than one to read.
MAX_STOPPED_BYTES = 16 * MIB


def write_report(folder: RunFolder, job: Job, reporter: Reporter, *, stopped: bool = False) -> None:
    """Write the page of a run to its folder. A failure is only reported to `reporter`: the run itself is complete.

    Args:
      folder: the folder of the run.
      job: the job of the run.
      reporter: receives the reason if the page cannot be written.
      stopped: whether the run was asked to stop. The page of a long run is then not written.
    """
    try:
        if stopped and folder.metrics.stat().st_size > MAX_STOPPED_BYTES:
            return
        from forerun.report.page import page  # imports jinja2, which the steps of a run do not need

        atomic_write(folder.path / FILE, page(record_of(str(folder.path), folder, job)))
    except Exception as error:  # a page must never fail a run that trained for days
        reporter.warn(f"{folder.path / FILE} was not written: {type(error).__name__}: {error}")
