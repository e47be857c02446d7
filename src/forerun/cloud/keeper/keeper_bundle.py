"""The bundle of a keeper: forerun, the job with its files, the run's ssh key, and the secrets of the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from forerun.cloud.keeper.settings import KeeperSettings
from forerun.cloud.record.entries import CloudRun
from forerun.cloud.setup.bundle import Bundle, environment_file
from forerun.cloud.setup.job_files import JOB_FILE, JobFiles
from forerun.cloud.setup.requirements import locked_requirements
from forerun.cloud.setup.startup import planned_python
from forerun.cloud.setup.units import AGENT_UNIT, TRAIN_UNIT
from forerun.cloud.setup.wheel import build_wheel

DEVICE = "none"  # neither packages for accelerators nor a test of devices
UNITS = Path(__file__).parent / "units"


def make_keeper_bundle(
    run: CloudRun, settings: KeeperSettings, local: JobFiles, secrets: Mapping[str, str], identity: Path
) -> Bundle:
    """Return the files of a keeper. The startup script of a host installs them, so that their names are the same.

    The unit of the agent runs the controller; the unit of the training does nothing. The file `secret` contains the
    private key with which the keeper reaches the hosts.
    """
    wheel, locked = build_wheel(), locked_requirements(DEVICE, planned_python(run))
    files: dict[str, bytes | Path] = {
        wheel.name: wheel.content,
        "requirements.lock": locked.content,
        "secret": identity.read_bytes(),
        "environment": environment_file(secrets).encode(),
        "agent.json": replace(settings, overrides=local.overrides).to_json(),
        f"job/{JOB_FILE}": run.job.encode(),
    }
    files |= {f"units/{name}": (UNITS / name).read_bytes() for name in (AGENT_UNIT, TRAIN_UNIT)}
    files |= {f"job/{one.name}": one.source for one in local.files}
    return Bundle(files)
