"""The devices that jax finds, determined in a child process.

A runtime that hangs or aborts ends only the child, not `forerun doctor`. The child is
`python -m forerun.doctor.device_probe`. It chooses devices exactly as a job with `device: auto` does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from forerun.doctor.child_process import ending_of, run_module

ANSWER = "forerun-sight "


@dataclass(frozen=True)
class DeviceProbe:
    """The result of the child process. If it failed, only `error` is set."""

    platform: str = ""
    kind: str = ""
    devices: int = 0
    processes: int = 0
    reason: str = ""
    warning: str | None = None
    error: str | None = None


def look(timeout_seconds: float = 120, command: tuple[str, ...] | None = None) -> DeviceProbe:
    """Start the child process and return its result. A timeout or a crash is returned as an error."""
    done = run_module("forerun.doctor.device_probe", timeout_seconds, command)
    if done is None:
        return DeviceProbe(error=f"no answer from jax within {timeout_seconds:g} s")
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return DeviceProbe(**json.loads(line.removeprefix(ANSWER)))
    return DeviceProbe(error=f"jax {ending_of(done)}")


def _find_devices() -> DeviceProbe:
    """Return the devices that jax finds in this process."""
    from forerun.hardware.devices import choose

    chosen = choose("auto", None)
    first = chosen.devices[0]
    processes = len({device.process_index for device in chosen.devices})
    return DeviceProbe(
        chosen.platform, first.device_kind, len(chosen.devices), processes, chosen.reason, chosen.warning
    )


if __name__ == "__main__":
    print(ANSWER + json.dumps(asdict(_find_devices())))
