"""Opening of the folder of a run by `train`: a new one, or that of an earlier process.

`require_run_in_place` finds a run whose folder was moved or renamed, so that its job would start over in a new folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from forerun.config.load import dump, load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write, read_regular
from forerun.reporter import SILENT, Reporter
from forerun.run_folder.run_folder import (
    CHECKPOINTS,
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
from forerun.storage.address import Address
from forerun.units import MIB

MAX_JOB_BYTES = MIB


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
    from forerun.run_folder.stored_files import restore_files  # imports jax, which `require_run_in_place` does not need

    restore_files(folder.checkpoints(job), folder, reporter)
    return folder


def require_run_in_place(job: Job, job_file: Path | None = None, ask: Callable[[str], bool] | None = None) -> None:
    """Raise if the job would start over because the folder of its run was moved.

    A job without a folder is compared with the runs beside it and with the run that contains `job_file`. Checkpoints
    outside of the folder (`checkpoint.folder`) are found by name, so they are not concerned.

    Args:
      job: the job to train.
      job_file: the file that the job was read from.
      ask: returns whether the user agrees to start over. None: there is no terminal.

    Raises:
      UserError: a moved run exists, and the user did not agree to start over.
    """
    own_folder = folder_of(job)
    if Address.of(job.runs).is_remote or job.checkpoint.folder is not None or _has_checkpoints(own_folder.path):
        return
    moved = next(_moved_runs(job, own_folder, job_file), None)
    if moved is None:
        return
    what = f"{own_folder.path} would start from the beginning, and {moved} contains a run of this job"
    if ask is not None and ask(f"{what}. Start from the beginning?"):
        return
    overrides = [f"name={moved.name}"] if moved.name != job.name else []
    if moved.resolve().parent != own_folder.path.resolve().parent:
        overrides.append(f"runs={moved.parent.resolve()}")
    raise UserError(
        "E-RUN-093",
        what,
        why=f"{own_folder.path} has no checkpoints; the folder of a run is runs/NAME, and it was moved, renamed "
        "or copied",
        fix=f"to resume that run, add {shlex.join(overrides)}, or move it to {own_folder.path}; "
        "to start over, add --fresh",
    )


def _moved_runs(job: Job, own_folder: RunFolder, job_file: Path | None) -> Iterator[Path]:
    """Yield the folders of runs of this job that have another place than its own folder."""
    if job_file is not None and _has_checkpoints(job_file.parent) and job_file.name == own_folder.job.name:
        recorded = load(job_file).job
        # Another name or folder was given by an override, so that a new run is intended.
        if (recorded.name, recorded.runs) == (job.name, job.runs):
            yield job_file.parent
    renamed_by_fresh = re.compile(re.escape(job.name) + r"\.old-\d+")
    for folder in sorted(own_folder.path.parent.iterdir()) if own_folder.path.parent.is_dir() else ():
        if folder == own_folder.path or renamed_by_fresh.fullmatch(folder.name) or not _has_checkpoints(folder):
            continue
        if _recorded_name(RunFolder(folder).job) == job.name:
            yield folder


def _has_checkpoints(folder: Path) -> bool:
    path = folder / CHECKPOINTS
    return path.is_dir() and any(path.iterdir())


def _recorded_name(file: Path) -> str | None:
    """Return the name in a `job.yaml`, or None if it cannot be read. Other runs may be damaged."""
    try:
        content = yaml.safe_load(read_regular(file, MAX_JOB_BYTES))
    except (OSError, UserError, ValueError, yaml.YAMLError, RecursionError):
        return None
    name = content.get("name") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None
