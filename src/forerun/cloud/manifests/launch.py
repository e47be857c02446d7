"""What every scheduler needs to know about a job, and the command that it runs on each host."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forerun.cloud.labels import run_label
from forerun.errors import UserError
from forerun.exit_codes import ENDED, USER_MISTAKE
from forerun.hardware.slices import Slice

Device = Literal["tpu", "gpu", "cpu"]
STOP_SECONDS = 120  # between the request to stop and the kill: one step, and the save of a checkpoint
# Exit codes after which a restart cannot help: an error in the job, and five restarts without a new step.
FINAL_EXIT_CODES = (USER_MISTAKE, ENDED)


@dataclass(frozen=True)
class Launch:
    """A job that a scheduler starts.

    Attributes:
      name: the name of the run.
      job: the job file as text, with all overrides.
      slice: the TPU slice; None for GPUs and CPUs.
      hosts: the number of hosts.
      gpus_per_host: zero for TPUs and CPUs.
      spot: whether the machines may be preempted.
      queue: the local queue of Kueue, or the partition of Slurm; None is the cluster's default.
      hours: the longest time of one start; None is the scheduler's limit.
    """

    name: str
    job: str
    device: Device
    slice: Slice | None
    hosts: int
    gpus_per_host: int = 0
    spot: bool = False
    queue: str | None = None
    image: str | None = None
    hours: float | None = None

    @property
    def label(self) -> str:
        return run_label(self.name)


def train_arguments(launch: Launch, job_file: str, options: str = "") -> str:
    """Return the words after `forerun`, quoted for a shell.

    They name the device, so that no host trains on its CPUs by accident.
    """
    words = shlex.join(["train", job_file, f"device={launch.device}", "--supervise"])
    return f"{words} {options}".rstrip()


def require_slice(launch: Launch, scheduler: str, names: Callable[[str], str | None]) -> tuple[Slice, str]:
    """Return the slice and the scheduler's name of its chips; raise an error if the scheduler does not offer them."""
    chip = launch.slice.chip.name if launch.slice else launch.device
    name = names(chip) if launch.slice else None
    if launch.slice is None or name is None:
        raise UserError(
            "E-CLOUD-080",
            f"forerun writes no {scheduler} file for {chip}",
            why=f"{scheduler} offers TPU slices of the generations v4 and later to forerun"
            if scheduler == "GKE"
            else f"{scheduler} is supported for TPU slices",
            fix="choose a slice with --on, for example --on v6e-8, or another scheduler: --for slurm",
        )
    return launch.slice, name
