"""A task for SkyPilot. SkyPilot runs the commands of a task on every host of a TPU slice."""

from __future__ import annotations

from typing import Any

from forerun.cloud.manifests.launch import Launch, require_slice, train_arguments
from forerun.cloud.manifests.yaml_text import documents
from forerun.cloud.tpu.node_request import RUNTIMES
from forerun.exit_codes import STOPPED

RESTARTS_ON_ERRORS = 3  # preemptions are not counted


def task(launch: Launch, wheel: str, lock: str, python: str) -> str:
    """Return a task file. It expects the job, the wheel and the lock file in the same folder."""
    slice_, runtime = require_slice(launch, "SkyPilot", RUNTIMES.get)
    several = launch.hosts > 1
    resources: dict[str, Any] = {
        "infra": "gcp",
        "accelerators": accelerator(slice_.name),
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


def accelerator(slice_name: str) -> str:
    """Return SkyPilot's name of a slice: `v5e-8` is `tpu-v5litepod-8`."""
    return f"tpu-{slice_name.replace('v5e-', 'v5litepod-')}:1"
