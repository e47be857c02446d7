"""The folder that `forerun manifest` writes: the scheduler's file, and everything that it refers to."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.cloud.manifests.gke import dockerfile, jobset, secret_name
from forerun.cloud.manifests.launch import Launch
from forerun.cloud.manifests.skypilot import task
from forerun.cloud.manifests.slurm import batch_script
from forerun.cloud.one_line import require_one_line
from forerun.cloud.setup.requirements import locked_requirements, running_python
from forerun.cloud.setup.wheel import build_wheel
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.storage.address import Address

Scheduler = Literal["gke", "skypilot", "slurm"]
LOCK = "requirements.lock"
SECRET = "secret"


@dataclass(frozen=True)
class LaunchFolder:
    """The files of a launch and the commands that start it.

    Attributes:
      files: the content of each file by its name. The file `secret` is readable by its owner only.
      commands: what the user runs next, in this order.
    """

    files: Mapping[str, bytes]
    commands: Sequence[str]

    def write(self, folder: Path) -> None:
        """Write the files. An existing secret is kept, because a run that is in progress may use it."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if name == SECRET:
                _write_secret(folder / name, content)
            else:
                atomic_write(folder / name, content)


def launch_folder(launch: Launch, scheduler: Scheduler, folder: Path, job_folder: Path) -> LaunchFolder:
    """Return the files for a scheduler.

    Args:
      folder: where they will be written.
      job_folder: what paths in the job are relative to.

    Raises:
      UserError: the scheduler does not offer the slice, an option that it needs is missing, or a text has a
        control character.
    """
    texts = {"--queue": launch.queue, "--image": launch.image, "--to": str(folder), "the job's folder": str(job_folder)}
    require_one_line(texts)
    several = launch.hosts > 1
    files: dict[str, bytes] = {SECRET: secrets.token_hex(32).encode()} if several else {}
    if scheduler == "slurm":
        script = batch_script(launch, str(folder.absolute()), str(job_folder.absolute()))
        files |= {"job.yaml": launch.job.encode(), "job.sbatch": script.encode()}
        return LaunchFolder(files, (f"sbatch {folder / 'job.sbatch'}",))
    wheel, lock = build_wheel(), locked_requirements(launch.device)
    files |= {wheel.name: wheel.content, LOCK: lock.content}
    if scheduler == "skypilot":
        files |= {
            "job.yaml": launch.job.encode(),
            "task.yaml": task(launch, wheel.name, LOCK, running_python()).encode(),
        }
        option = " --secret FORERUN_SECRET" if several else ""
        setting = f"export FORERUN_SECRET=$(cat {folder / SECRET})"
        start = f"cd {folder} && sky jobs launch task.yaml{option}"
        return LaunchFolder(files, (setting, start) if several else (start,))
    if launch.image is None:
        raise UserError(
            "E-CLOUD-082",
            "a JobSet needs --image",
            why="the nodes of a cluster pull forerun as a container image",
            fix="--image REGION-docker.pkg.dev/PROJECT/REPOSITORY/forerun:1; the Dockerfile for it is written too",
        )
    files |= {
        "Dockerfile": dockerfile(wheel.name, LOCK, running_python()).encode(),
        "jobset.yaml": jobset(launch).encode(),
    }
    secret = f"kubectl create secret generic {secret_name(launch)} --from-file=secret={folder / SECRET}"
    commands = [
        f"docker build -t {launch.image} {folder} && docker push {launch.image}",
        *([secret] if several else []),
        f"kubectl apply -f {folder / 'jobset.yaml'}",
    ]
    return LaunchFolder(files, commands)


def require_shared_places(scheduler: Scheduler, checkpoints: str | None, local_files: Sequence[str]) -> None:
    """Raise an error if the machines of a scheduler would lose the checkpoints or not find the data.

    On Slurm, a shared file system is usual, so local folders are accepted.
    """
    if scheduler == "slurm":
        return
    if checkpoints is None or not Address.of(checkpoints).is_bucket:
        raise UserError(
            "E-CLOUD-081",
            "the checkpoints would be lost with the machine",
            why=f"checkpoint.folder is {checkpoints or 'not set'}, and a machine of {scheduler} has no lasting disk",
            fix="add checkpoint.folder=gs://BUCKET/FOLDER",
        )
    if local_files:
        raise UserError(
            "E-CLOUD-083",
            f"{local_files[0]} is only on this machine",
            why=f"the machines of {scheduler} do not get the job's local files ({len(local_files)} in all)",
            fix="put the data into a bucket or a Hub repository, or use forerun run, which sends local files",
        )


def _write_secret(path: Path, content: bytes) -> None:
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
    except FileExistsError:
        path.chmod(0o600)
