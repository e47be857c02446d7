"""The paths of a host that the agent reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAIN_UNIT = "forerun-train.service"


@dataclass(frozen=True)
class HostLayout:
    """The file tree of a host.

    Attributes:
      root: `/` on a real host. A test uses a temporary folder, with its own `systemctl` in `usr/bin`.
    """

    root: Path = Path("/")

    @property
    def state_folder(self) -> Path:
        return self.root / "var/lib/forerun"

    @property
    def job_folder(self) -> Path:
        return self.state_folder / "job"

    @property
    def settings(self) -> Path:
        return self.state_folder / "agent.json"

    @property
    def setup_state(self) -> Path:
        """One line that the startup script writes: the phase of the setup, and a reason after `broken`."""
        return self.state_folder / "state"

    @property
    def clock(self) -> Path:
        """The state of the agent's clock, which must survive restarts."""
        return self.state_folder / "agent-clock.json"

    def boot_id(self) -> str:
        """Return the ID of this boot of the machine, or an empty string."""
        try:
            return (self.root / "proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        except (OSError, ValueError):
            return ""

    @property
    def log_position(self) -> Path:
        return self.state_folder / "agent-log.json"

    @property
    def export(self) -> Path:
        return self.state_folder / "export"

    @property
    def log_folder(self) -> Path:
        return self.root / "var/log/forerun"

    @property
    def export_log(self) -> Path:
        return self.log_folder / "export.log"

    @property
    def copied_logs(self) -> tuple[Path, ...]:
        """The logs that the agent copies to the bucket, in their order."""
        return (self.log_folder / "startup.log", self.log_folder / "train.log", self.export_log)

    @property
    def forerun(self) -> Path:
        return self.root / "opt/forerun/venv/bin/forerun"

    @property
    def systemctl(self) -> str:
        own = self.root / "usr/bin/systemctl"
        return str(own) if own.exists() else "systemctl"
