"""The settings of an agent: `/var/lib/forerun/agent.json`. It contains no secret."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError


@dataclass(frozen=True)
class AgentSettings:
    """What an agent must know about its run.

    Attributes:
      folder: the bucket folder of the run.
      attempt: the number of the attempt that this slice belongs to.
      hosts: the number of hosts of the slice.
      export: whether host 0 exports the finished model.
      resource: the name of the slice, which `provider` deletes in `zone`.
      host: the index of this host; None: it comes from the instance metadata.
      run_folder: the run's folder, relative to the job's folder.
    """

    folder: str
    attempt: int
    hosts: int
    run_name: str
    provider: str
    resource: str
    zone: str
    project: str | None = None
    device: str = "tpu"
    export: bool = True
    total_steps: int | None = None
    host: int | None = None
    run_folder: str = ""

    @property
    def relative_run_folder(self) -> str:
        return self.run_folder or f"runs/{self.run_name}"


def read_settings(file: Path) -> AgentSettings:
    """Return the settings in a file. Keys of newer versions are ignored."""
    try:
        values = json.loads(file.read_bytes())
        known = {one.name for one in dataclasses.fields(AgentSettings)}
        return AgentSettings(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            "E-CLOUD-040",
            f"the agent cannot read its settings in {file}",
            why=str(error),
            fix="delete the slice with forerun down NAME, and start the run again: forerun run creates the file",
        ) from error
