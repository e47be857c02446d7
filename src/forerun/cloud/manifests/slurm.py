"""A batch script for Slurm: one task for each host, requeued after the loss of a node.

Slurm requeues a job whose node fails (`--requeue`). Before the time limit and before a preemption, it sends SIGTERM to
the training processes. They save a checkpoint and exit with code 75. The script then requeues the job itself.
"""

from __future__ import annotations

import shlex

from forerun.cloud.manifests.launch import STOP_SECONDS, Launch, train_arguments
from forerun.exit_codes import STOPPED
from forerun.supervise.host_address import PORT


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
