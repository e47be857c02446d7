"""`forerun manifest`: write the files that start a job with Kubernetes, SkyPilot or Slurm."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.cloud.manifests import Launch
    from forerun.config.load import LoadedJob


def run(args: argparse.Namespace) -> int:
    from forerun.cloud.manifests import launch_folder, require_shared_places
    from forerun.cloud.one_line import require_one_line
    from forerun.cloud.setup.job_files import job_files
    from forerun.verbs.job_files import open_job

    require_one_line(vars(args))
    loaded = open_job(args.job, args.overrides)
    launch = _launch(args, loaded)
    job_folder = loaded.path.parent
    local = job_files(loaded.path.read_text(encoding="utf-8"), job_folder, args.overrides, "/job").files
    require_shared_places(args.scheduler, loaded.job.checkpoint.folder, [str(one.source) for one in local])
    folder = Path(args.to or f"{launch.label}-{args.scheduler}")
    content = launch_folder(launch, args.scheduler, folder, job_folder)
    content.write(folder)
    print(f"{folder}: {', '.join(content.files)}")
    print("start the job with")
    for command in content.commands:
        print(f"  {command}")
    return 0


def _launch(args: argparse.Namespace, loaded: LoadedJob) -> Launch:
    from forerun.cloud.compute.machine_types import several_slices_error
    from forerun.cloud.manifests import Launch
    from forerun.config.load import dump
    from forerun.errors import UserError
    from forerun.hardware.slices import slice_named

    job = loaded.job
    text = dump(job, defaults=False)
    if not text.startswith("name:"):  # a name that is the default is omitted
        text = f"name: {job.name}\n{text}"
    options = {"spot": args.spot, "queue": args.queue, "image": args.image, "hours": args.hours}
    if args.on is not None:
        slice_ = slice_named(args.on)
        if slice_.slices > 1:
            raise several_slices_error(args.on)
        return Launch(job.name, text, "tpu", slice_, slice_.hosts, **options)
    if args.scheduler == "slurm" and args.nodes is not None:
        return Launch(job.name, text, "gpu" if args.gpus else "cpu", None, args.nodes, args.gpus or 0, **options)
    raise UserError(
        "E-COMMAND-095",
        "the machines are missing",
        why="a scheduler must know how many hosts to start",
        fix="--on v6e-8 for a TPU slice" + (", or --nodes 2 --gpus 8" if args.scheduler == "slurm" else ""),
    )
