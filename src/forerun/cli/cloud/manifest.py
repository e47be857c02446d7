"""`forerun manifest`: write the files that start a job with Kubernetes, SkyPilot or Slurm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forerun.verbs.option_types import Count, Folder, Hours, JobFile, Name, Override, Slice, Value

if TYPE_CHECKING:
    from forerun.cloud.manifests import Launch
    from forerun.config.load import LoadedJob


def manifest(
    job: JobFile,
    *overrides: Override,
    on: Slice | None = None,
    scheduler: Annotated[Literal["gke", "skypilot", "slurm"], Value(option="for")],
    to: Folder | None = None,
    nodes: Count | None = None,
    gpus: Count | None = None,
    spot: bool = False,
    queue: Name | None = None,
    image: Annotated[str, Value("IMAGE")] | None = None,
    hours: Hours | None = None,
) -> int:
    """Write the files that start a job with Kubernetes, SkyPilot or Slurm.

    Args:
      on: slice to run on, for example v6e-256
      scheduler: gke: a JobSet for Kubernetes; skypilot: a task; slurm: a batch script
      to: folder to write (default: NAME-SCHEDULER)
      nodes: slurm, without `on`: number of nodes
      gpus: slurm, without `on`: GPUs of each node
      spot: gke, skypilot: use machines that may be preempted
      queue: gke: the local queue of Kueue; slurm: the partition
      image: gke: name of the container image with forerun
      hours: gke, slurm: end a start of the job after this time
    """
    from forerun.cloud.manifests import launch_folder, require_shared_places
    from forerun.cloud.one_line import require_one_line
    from forerun.cloud.setup.job_files import job_files
    from forerun.verbs.job_files import open_job

    texts = {"job": job, "overrides": overrides, "on": on, "to": to and os.fspath(to), "queue": queue, "image": image}
    require_one_line(texts)
    loaded = open_job(job, overrides)
    options = {"spot": spot, "queue": queue, "image": image, "hours": hours}
    launch = _launch(loaded, scheduler, on, nodes, gpus, options)
    job_folder = loaded.path.parent
    local = job_files(loaded.path.read_text(encoding="utf-8"), job_folder, overrides, "/job").files
    require_shared_places(scheduler, loaded.job.checkpoint.folder, [str(one.source) for one in local])
    folder = Path(to or f"{launch.label}-{scheduler}")
    content = launch_folder(launch, scheduler, folder, job_folder)
    content.write(folder)
    print(f"{folder}: {', '.join(content.files)}")
    print("start the job with")
    for command in content.commands:
        print(f"  {command}")
    return 0


def _launch(
    loaded: LoadedJob, scheduler: str, on: str | None, nodes: int | None, gpus: int | None, options: dict[str, Any]
) -> Launch:
    from forerun.cloud.compute.machine_types import several_slices_error
    from forerun.cloud.manifests import Launch
    from forerun.config.load import dump
    from forerun.errors import UserError
    from forerun.hardware.slices import slice_named

    job = loaded.job
    text = dump(job, defaults=False)
    if not text.startswith("name:"):  # a name that is the default is omitted
        text = f"name: {job.name}\n{text}"
    if on is not None:
        slice_ = slice_named(on)
        if slice_.slices > 1:
            raise several_slices_error(on)
        return Launch(job.name, text, "tpu", slice_, slice_.hosts, **options)
    if scheduler == "slurm" and nodes is not None:
        return Launch(job.name, text, "gpu" if gpus else "cpu", None, nodes, gpus or 0, **options)
    raise UserError(
        "E-COMMAND-095",
        "the machines are missing",
        why="a scheduler must know how many hosts to start",
        fix="--on v6e-8 for a TPU slice" + (", or --nodes 2 --gpus 8" if scheduler == "slurm" else ""),
    )
