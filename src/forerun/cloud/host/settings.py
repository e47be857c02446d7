"""The settings of an agent, and the paths of a host that it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from forerun.cloud.record.entries import MOST_HOSTS, AttemptNumber, HostIndex, LimitSeconds, Name, Time, Word
from forerun.cloud.record.read_entry import DamagedEntry, read_entry
from forerun.errors import UserError


@dataclass(frozen=True)
class AgentSettings:
    """What an agent must know about its run. The deadline is delivered too: the record may be lost or forged.

    Attributes:
      folder: the bucket folder of the run.
      attempt: the number of the attempt that this slice belongs to.
      hosts: the number of hosts of the slice.
      export: whether host 0 exports the finished model.
      resource: the name of the slice, which `provider` deletes in `zone`.
      host: the index of this host; None: it comes from the instance metadata.
      limit_seconds: how long the slice may be billed; None: no limit.
      deadline_at: when that time ends by the cloud's clock; None: the controller did not know when billing began.
    """

    folder: Name
    attempt: AttemptNumber
    hosts: Annotated[int, Field(ge=1, le=MOST_HOSTS)]
    run_name: Name
    provider: Name
    resource: Name
    zone: Word
    project: Word | None = None
    export: bool = True
    host: HostIndex | None = None
    limit_seconds: LimitSeconds | None = None
    deadline_at: Time | None = None

    @property
    def run_folder(self) -> str:
        """The run's folder, relative to the job's folder."""
        return f"runs/{self.run_name}"


def read_settings(file: Path) -> AgentSettings:
    """Return the settings in a file. Keys of newer versions are ignored.

    Raises:
      UserError: The settings cannot be read. The watch of the startup script then deletes the slice at its limit.
    """
    try:
        settings = read_entry(AgentSettings, str(file), file.read_bytes())
    except OSError as error:
        settings = DamagedEntry(str(file), str(error))
    if not isinstance(settings, DamagedEntry):
        return settings
    raise UserError(
        "E-CLOUD-040",
        f"the agent cannot read its settings in {file}",
        why=settings.reason,
        fix="delete the slice with forerun down NAME, and start the run again: forerun run creates the file",
    )


TRAIN_UNIT = "forerun-train.service"


class HostLayout:
    """The file tree of a host.

    Args:
      root: `/` on a real host. A test uses a temporary folder, with its own `systemctl` in `usr/bin`.

    Attributes:
      setup_state: one line that the startup script writes: the phase of the setup, and a reason after `broken`.
      clock: the state of the agent's clock, which must survive restarts.
      copied_logs: the logs that the agent copies to the bucket, in their order.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.state_folder = root / "var/lib/forerun"
        self.job_folder = self.state_folder / "job"
        self.settings = self.state_folder / "agent.json"
        self.setup_state = self.state_folder / "state"
        self.clock = self.state_folder / "agent-clock.json"
        self.log_position = self.state_folder / "agent-log.json"
        self.export = self.state_folder / "export"
        self.log_folder = root / "var/log/forerun"
        self.export_log = self.log_folder / "export.log"
        self.copied_logs = (self.log_folder / "startup.log", self.log_folder / "train.log", self.export_log)
        self.forerun = root / "opt/forerun/venv/bin/forerun"

    def boot_id(self) -> str:
        """Return the ID of this boot of the machine, or an empty string."""
        try:
            return (self.root / "proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        except (OSError, ValueError):
            return ""

    @property
    def systemctl(self) -> str:
        own = self.root / "usr/bin/systemctl"
        return str(own) if own.exists() else "systemctl"
