"""The systemd service that trains, as `systemctl` reports it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from forerun.cloud.host.layout import TRAIN_UNIT, HostLayout

CALL_SECONDS = 30.0
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
    if code in ("", "0") or not status.isdecimal():
        return ServiceState()
    return ServiceState(exit_code=int(status) if code == _EXITED else -int(status))


def training_state(layout: HostLayout) -> ServiceState | None:
    """Return the state of the training service, or None if `systemctl` does not answer."""
    command = [layout.systemctl, "show", TRAIN_UNIT, f"--property={','.join(_PROPERTIES)}"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=CALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_state(answer.stdout)


def stop_training(layout: HostLayout) -> None:
    """Ask the training service to stop. It saves a checkpoint and exits; this function does not wait for it."""
    command = [layout.systemctl, "stop", "--no-block", TRAIN_UNIT]
    try:
        subprocess.run(command, capture_output=True, timeout=CALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # the agent asks again
