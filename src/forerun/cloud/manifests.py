"""Files that start a job with a scheduler: a JobSet for GKE, a task for SkyPilot, a batch script for Slurm.

Each runs the same supervised command as a cloud run: `forerun train --supervise`, with one process per host.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from forerun.cloud.labels import run_label
from forerun.cloud.one_line import require_one_line
from forerun.cloud.setup.requirements import locked_requirements, running_python
from forerun.cloud.setup.wheel import build_wheel
from forerun.cloud.tpu.node_request import RUNTIMES
from forerun.errors import UserError
from forerun.exit_codes import ENDED, STOPPED, USER_MISTAKE
from forerun.files import atomic_write
from forerun.hardware.slices import Slice
from forerun.storage.address import Address
from forerun.supervise.host_address import PORT

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


# ---- the folder of a launch ----

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


# ---- GKE ----

# The label cloud.google.com/gke-tpu-accelerator of node pools.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
MAX_RESTARTS = 100  # preemptions included
JOB_FOLDER = "/job"
SECRET_KEY = "secret"


def jobset(launch: Launch) -> str:
    """Return a ConfigMap with the job and a JobSet, as one YAML file. The secret of the run is created by the user."""
    slice_, accelerator = require_slice(launch, "GKE", ACCELERATORS.get)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, slice_.shape)),
    }
    if launch.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    chips = slice_.chips // slice_.hosts
    several = launch.hosts > 1
    train = train_arguments(launch, f"{JOB_FOLDER}/job.yaml", "--host auto" if several else "")
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "nodeSelector": selector,
        "containers": [
            {
                "name": "forerun",
                "image": launch.image,
                "command": ["/bin/sh", "-c"],
                "args": [f"exec forerun {train}"],
                "env": [
                    {
                        "name": "FORERUN_SECRET",
                        "valueFrom": {"secretKeyRef": {"name": secret_name(launch), "key": SECRET_KEY}},
                    }
                ],
                "ports": [{"containerPort": 8471}, {"containerPort": PORT}],
                "resources": {"limits": {"google.com/tpu": chips}, "requests": {"google.com/tpu": chips}},
                "volumeMounts": [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}],
                "workingDir": "/tmp",
            }
        ],
        "volumes": [{"name": "job", "configMap": {"name": f"{launch.label}-job"}}],
    }
    if not several:
        del pod["containers"][0]["env"]
    if launch.spot:
        pod["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    job_spec: dict[str, Any] = {
        "parallelism": launch.hosts,
        "completions": launch.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "forerun",
                        "operator": "In",
                        "values": list(FINAL_EXIT_CODES),
                    },
                }
            ]
        },
        "template": {"spec": pod},
    }
    if launch.hours is not None:
        job_spec["activeDeadlineSeconds"] = round(launch.hours * 3600)
    labels = {"forerun-run": launch.label}
    if launch.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = launch.queue
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{launch.label}-job", "labels": {"forerun-run": launch.label}},
        "data": {"job.yaml": launch.job},
    }
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": launch.label,
            "labels": labels,
            # All pods of the Job are on one node pool, which is one slice, and no other Job uses it.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                "rules": [
                    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job_spec}}],
        },
    }
    if launch.hours is not None:
        whole["spec"]["failurePolicy"]["rules"].append(  # type: ignore[index]
            {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        )
    return documents(config, whole)


def secret_name(launch: Launch) -> str:
    return f"{launch.label}-secret"


def dockerfile(wheel: str, lock: str, python: str) -> str:
    """Return a Dockerfile that installs the wheel and its hash-locked requirements."""
    return (
        f"FROM python:{python}-slim\n"
        f"COPY {lock} {wheel} /tmp/\n"
        f"RUN pip install --no-cache-dir --require-hashes -r /tmp/{lock} \\\n"
        f" && pip install --no-cache-dir --no-deps /tmp/{wheel}\n"
    )


# ---- SkyPilot ----

RESTARTS_ON_ERRORS = 3  # preemptions are not counted


def task(launch: Launch, wheel: str, lock: str, python: str) -> str:
    """Return a task file. It expects the job, the wheel and the lock file in the same folder."""
    slice_, runtime = require_slice(launch, "SkyPilot", RUNTIMES.get)
    several = launch.hosts > 1
    resources: dict[str, Any] = {
        "infra": "gcp",
        "accelerators": skypilot_accelerator(slice_.name),
        # SkyPilot 0.14 chooses a runtime version that does not fit v5e.
        "accelerator_args": {"runtime_version": runtime, "tpu_vm": True},
        "use_spot": launch.spot,
        "job_recovery": {
            "max_restarts_on_errors": RESTARTS_ON_ERRORS,
            # Only a stop on request is always worth a restart. The exit codes of errors in the job are not here.
            "recover_on_exit_codes": [STOPPED],
        },
    }
    content: dict[str, Any] = {"name": launch.label, "resources": resources, "num_nodes": 1}
    if several:
        content["secrets"] = {"FORERUN_SECRET": None}
    content["file_mounts"] = {
        "/tmp/forerun/job.yaml": "./job.yaml",
        f"/tmp/forerun/{wheel}": f"./{wheel}",
        f"/tmp/forerun/{lock}": f"./{lock}",
    }
    content["setup"] = (
        "set -e\n"
        "python3 -m pip install --user --quiet uv\n"
        f"~/.local/bin/uv venv --quiet --python {python} ~/forerun\n"
        f"~/.local/bin/uv pip install --quiet --python ~/forerun --require-hashes -r /tmp/forerun/{lock}\n"
        f"~/.local/bin/uv pip install --quiet --python ~/forerun --no-deps /tmp/forerun/{wheel}\n"
    )
    train = train_arguments(launch, "/tmp/forerun/job.yaml", "--host auto" if several else "")
    content["run"] = f"exec ~/forerun/bin/forerun {train}\n"
    return documents(content)


def skypilot_accelerator(slice_name: str) -> str:
    """Return SkyPilot's name of a slice: `v5e-8` is `tpu-v5litepod-8`."""
    return f"tpu-{slice_name.replace('v5e-', 'v5litepod-')}:1"


# ---- Slurm ----


def batch_script(launch: Launch, folder: str, job_folder: str) -> str:
    """Return the script.

    Args:
      folder: has the job, the secret and the log.
      job_folder: what paths in the job are relative to. All nodes share the file systems of both folders.
    """
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={launch.label}",
        f"#SBATCH --nodes={launch.hosts}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={folder}/slurm-%j.log",
        f"#SBATCH --signal=TERM@{STOP_SECONDS}",
    ]
    if launch.queue is not None:
        lines.append(f"#SBATCH --partition={launch.queue}")
    if launch.gpus_per_host:
        lines.append(f"#SBATCH --gpus-per-node={launch.gpus_per_host}")
    if launch.hours is not None:
        lines.append(f"#SBATCH --time={max(1, round(launch.hours * 60))}")
    several = launch.hosts > 1
    options = '--host "$SLURM_PROCID/$SLURM_NTASKS" --leader "$LEADER" --secret "$LAUNCH/secret"' if several else ""
    train = train_arguments(launch, "JOB", options).replace("JOB", '"$LAUNCH/job.yaml"', 1)
    lines += [
        "",
        "# FORERUN is the command on the nodes; set it if forerun is not on the PATH there.",
        'export FORERUN="${FORERUN:-forerun}"',
        f"export LAUNCH={shlex.quote(folder)}",
        f"cd {shlex.quote(job_folder)} || exit 2",
    ]
    if several:
        lines += [
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            # The address that Slurm itself uses: names of nodes need not resolve.
            "address=$(scontrol show node \"$first\" | grep -oP 'NodeAddr=\\K\\S+')",
            # The port differs between jobs, because two of them may share a node.
            f'export LEADER="$address:$(({PORT} + SLURM_JOB_ID % 1000))"',
        ]
    lines += [
        f"srun --kill-on-bad-exit=0 --wait=0 bash -c 'exec $FORERUN {train}'",
        "code=$?",
        # Stopped on request: the time limit, or a preemption. After the loss of a node, Slurm requeues the job itself.
        'now=$(scontrol show job "$SLURM_JOB_ID" | tr -s " \\n" "\\n")',
        'own="Restarts=${SLURM_RESTART_COUNT:-0}"',
        f'if [ "$code" = {STOPPED} ] && grep -qx "$own" <<<"$now" &&',
        '  grep -qx JobState=RUNNING <<<"$now"; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


# ---- YAML ----


class BlockDumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as they are."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


BlockDumper.add_representer(str, _block_text)


def documents(*contents: Mapping[str, Any]) -> str:
    """Return the documents of a YAML file."""
    return yaml.dump_all(contents, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=120)
