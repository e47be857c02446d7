"""The systemd service that trains, as `systemctl` reports it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from forerun.cloud.host.layout import TRAIN_UNIT, HostLayout

CALL_SECONDS = 10.0  # two calls that hang take less time than DELETE_SECONDS
_PROPERTIES = ("ActiveState", "ExecMainCode", "ExecMainStatus")
_EXITED = "1"  # CLD_EXITED of waitid(2): the status is an exit code. Other values: the number of a signal.


@dataclass(frozen=True)
class ServiceState:
    """The state of the training service.

    Attributes:
      is_active: it runs, starts or stops.
      exit_code: of its last process, or minus the number of the signal that ended it; None if none has ended.
    """

    is_active: bool = False
    exit_code: int | None = None


def parse_state(text: str) -> ServiceState | None:
    """Return the state in the output of `systemctl show`, or None if the output has no state."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    active = values.get("ActiveState", "")
    if not active:
        return None
    if active not in ("inactive", "failed"):
        return ServiceState(is_active=True)
    code, status = values.get("ExecMainCode", "0"), values.get("ExecMainStatus", "")
    if code in ("", "0") or not re.fullmatch(r"[0-9]{1,3}", status):
        return ServiceState()
    return ServiceState(exit_code=int(status) if code == _EXITED else -int(status))


class TrainingService:
    """The training service of a host."""

    def __init__(self, layout: HostLayout) -> None:
        self._systemctl = layout.systemctl

    def state(self) -> ServiceState | None:
        """Return the state of the service, or None if `systemctl` does not answer."""
        command = [self._systemctl, "show", TRAIN_UNIT, f"--property={','.join(_PROPERTIES)}"]
        try:
            answer = subprocess.run(command, capture_output=True, timeout=CALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return parse_state(answer.stdout.decode(errors="replace"))

    def stop(self) -> None:
        """Ask the service to stop. It saves a checkpoint and exits; this function does not wait for it."""
        command = [self._systemctl, "stop", "--no-block", TRAIN_UNIT]
        try:
            subprocess.run(command, capture_output=True, timeout=CALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return  # the agent asks again
