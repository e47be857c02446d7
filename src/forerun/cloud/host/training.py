"""The training on a host: its systemd service, its progress, and how its program differs from the planned one."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cloud.deadline import credible_save_seconds
from forerun.cloud.host.settings import TRAIN_UNIT, HostLayout
from forerun.cloud.record.entries import Option
from forerun.errors import UserError
from forerun.hardware.slices import slice_named
from forerun.report.differences import ProgramFacts, program_differences

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


MOST_BYTES = 16 << 20
MOST_STEPS = 10**15
_PROGRAM = re.compile(r"[0-9a-zA-Z]{1,100}")


@dataclass(frozen=True)
class TrainProgress:
    """What the run's folder tells about its progress. Only host 0 has these files.

    Attributes:
      step: the last finished step; None if it is not known.
      save_seconds: the time of the last save on the slowest host.
      program: the hash of the compiled program, or an empty string.
    """

    step: int | None = None
    save_seconds: float | None = None
    program: str = ""


def read_progress(run: Path, host: int) -> TrainProgress:
    """Return the progress of a host. Files and values that are missing, damaged or not credible count as empty."""
    entries = _object(run / "hosts.json").get("hosts")
    hosts = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    steps = [entry.get("step") for entry in hosts if entry.get("index") == host]
    saves = [seconds for entry in hosts if (seconds := credible_save_seconds(entry.get("save_seconds"))) is not None]
    program = _object(run / "program.json").get("program")
    return TrainProgress(
        step=steps[0] if steps and _is_count(steps[0]) else None,
        save_seconds=max(saves, default=None),
        program=program if isinstance(program, str) and _PROGRAM.fullmatch(program) else "",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS


def _object(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def planned_program(option: Option, versions: Mapping[str, str]) -> ProgramFacts | None:
    """Return what is known about the planned program of an option, or None if no program was planned."""
    if not option.program:
        return None
    try:
        found = slice_named(option.slice)
    except UserError:  # a GPU machine
        return ProgramFacts(option.program, versions=versions)
    return ProgramFacts(option.program, found.chip.name, found.devices, versions=versions)


def program_note(planned: ProgramFacts, compiled: ProgramFacts | None) -> str:
    """Return how the compiled program differs from the planned one, or an empty string."""
    if compiled is None or compiled.program == planned.program:
        return ""
    reasons = "; ".join(program_differences(planned, compiled))
    return f"program {compiled.program} differs from the planned {planned.program}: {reasons}"
