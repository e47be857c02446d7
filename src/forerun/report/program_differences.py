"""Why a run compiles another program than the one that was planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.run_folder.run_folder import RunFolder

UNEXPLAINED = "versions, devices, mesh and job agree: an environment variable of jax, a plugin or edited code differs"


@dataclass(frozen=True)
class ProgramFacts:
    """A program's hash and what it depends on. Values that are not known are empty.

    Attributes:
      device: the chip, such as `v6e`, or jax's name of another device.
      devices: the number of devices.
      job: the values of the resolved job as texts, by their key.
    """

    program: str
    device: str = ""
    devices: int | None = None
    mesh: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, str] = field(default_factory=dict)


def program_of_run(run: Path) -> ProgramFacts | None:
    """Return the facts in a run's program.json, or None if the run has not compiled yet."""
    try:
        content: dict[str, Any] = json.loads(RunFolder(run).program.read_bytes())
        return ProgramFacts(**{name: content[name] for name in ProgramFacts.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def program_differences(planned: ProgramFacts, trained: ProgramFacts) -> list[str]:
    """Return why two programs differ, one reason per line; an empty list if they are equal.

    A reason is a difference in versions, device, mesh or job. Facts that one side does not know are not compared.
    """
    if planned.program == trained.program:
        return []
    reasons = [
        f"{name} {trained.versions[name]}, planned with {version}"
        for name, version in planned.versions.items()
        if not f"{trained.versions.get(name, version)}.".startswith(f"{version}.")  # 3.11 was planned, 3.11.9 runs
    ]
    for what, before, now in (
        ("device", planned.device, trained.device),
        ("devices", planned.devices, trained.devices),
        ("mesh", planned.mesh, trained.mesh),
    ):
        if before and now and before != now:
            reasons.append(f"{what} {now}, planned for {before}")
    if planned.job and trained.job:
        keys = [key for key in {**planned.job, **trained.job} if planned.job.get(key) != trained.job.get(key)]
        reasons += [f"{key}: {trained.job.get(key, 'none')}, planned {planned.job.get(key, 'none')}" for key in keys]
    return reasons or [UNEXPLAINED]
