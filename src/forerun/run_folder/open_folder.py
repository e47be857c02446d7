"""Opening of the folder of a run by `train`: a new one, or that of an earlier process."""

from __future__ import annotations

from forerun.config.load import dump, load
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.reporter import SILENT, Reporter
from forerun.run_folder.run_folder import (
    RunFolder,
    copy_template,
    folder_of,
    is_blank,
    job_file_problem,
    newest_record,
    recorded_job,
    rename_existing_run,
    require_same_job,
)
from forerun.run_folder.stored_files import restore_files


def open_folder(job: Job, *, fresh: bool, writes: bool = True, reporter: Reporter = SILENT) -> RunFolder:
    """Create or open the run's folder, and write `job.yaml`.

    The job is compared with the job that the newest checkpoint recorded, because that record is verified. `job.yaml` is
    used for the comparison only if there is no checkpoint. Metrics, ledger and summary are restored if copies
    are stored with the checkpoints.

    Args:
      job: the resolved job.
      fresh: whether an existing run of this name is renamed first.
      writes: whether this host writes the folder. One host does this for all.
      reporter: receives a message if `job.yaml` was missing, damaged or changed.

    Raises:
      UserError: the folder belongs to another job.
    """
    folder = folder_of(job)
    if not writes:
        return folder
    if fresh:
        rename_existing_run(job)
    record = newest_record(folder.checkpoints(job), reporter)
    if record is not None:
        before = recorded_job(record.get("job"), folder)
        require_same_job(job, before, folder)
        if trouble := job_file_problem(folder.job, before):
            reporter.warn(
                f"{folder.job} {trouble}; it is restored, and the job is the one that the checkpoint recorded"
            )
    elif not is_blank(folder.job):
        require_same_job(job, load(folder.job).job, folder)
    elif folder.job.exists():
        reporter.warn(f"{folder.job} was empty; it is written again")
    folder.path.mkdir(parents=True, exist_ok=True)
    atomic_write(folder.job, dump(job))
    copy_template(job, folder, begun=record is not None)
    restore_files(folder.checkpoints(job), folder, reporter)
    return folder
