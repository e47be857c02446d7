"""Questions to jax that a child process answers: `python -m forerun.doctor.child_probe devices` or `gpu-compiler`.

A runtime or a compiler that hangs or aborts ends only the child, not `forerun doctor`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

SIGHT = "forerun-sight "  # the line with the devices begins with it
COMPILED = "forerun-compiled"
MACHINE = "h100-1"  # for which the tiny program is compiled


@dataclass(frozen=True)
class DeviceProbe:
    """The devices that jax finds. If the child process failed, only `error` is set."""

    platform: str = ""
    kind: str = ""
    devices: int = 0
    processes: int = 0
    reason: str = ""
    warning: str | None = None
    error: str | None = None


def probe_devices(timeout_seconds: float = 120, command: tuple[str, ...] | None = None) -> DeviceProbe:
    """Return the devices that a job with `device: auto` would use. A timeout or a crash is returned as an error."""
    process = _run("devices", timeout_seconds, command)
    if process is None:
        return DeviceProbe(error=f"no answer from jax within {timeout_seconds:g} s")
    for line in process.stdout.splitlines():
        if line.startswith(SIGHT):
            return DeviceProbe(**json.loads(line.removeprefix(SIGHT)))
    return DeviceProbe(error=f"jax {_ending(process)}")


def failure_of_gpu_compiler(timeout_seconds: float = 120, command: tuple[str, ...] | None = None) -> str | None:
    """Return why the GPU compiler cannot compile a tiny program, or None if it can. It needs no GPU."""
    process = _run("gpu-compiler", timeout_seconds, command, JAX_PLATFORMS="cpu")
    if process is None:
        return f"no result within {timeout_seconds:g} s"
    return None if COMPILED in process.stdout.split() else f"it {_ending(process)}"


def _run(
    question: str, timeout_seconds: float, command: tuple[str, ...] | None, **environment: str
) -> subprocess.CompletedProcess[str] | None:
    """Run this module, or `command` in place of it, and return its output; None if it exceeds the timeout."""
    # Pass the module path on, so that the child finds forerun even if it is not installed.
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.run(
            command or (sys.executable, "-P", "-m", "forerun.doctor.child_probe", question),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            env=os.environ | own | environment,
        )
    except subprocess.TimeoutExpired:
        return None


def _ending(process: subprocess.CompletedProcess[str]) -> str:
    """Return how a child process failed: its exit code and its last line."""
    last = (process.stderr.strip().splitlines() or ["no output"])[-1]
    return f"ended with code {process.returncode}: {last[:200]}"


# ---- In the child process ----


def _find_devices() -> DeviceProbe:
    from forerun.hardware.devices import choose

    chosen = choose("auto", None)
    processes = len({device.process_index for device in chosen.devices})
    kind = chosen.devices[0].device_kind
    return DeviceProbe(chosen.platform, kind, len(chosen.devices), processes, chosen.reason, chosen.warning)


def _compile_tiny_program() -> None:
    """Compile the addition of a number for one GPU."""
    import jax

    from forerun.hardware.slices import slice_named
    from forerun.planner.compile.installed_compilers import compile_only_topology

    device = compile_only_topology(slice_named(MACHINE)).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    number = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
    jax.jit(lambda x: x + 1).trace(number).lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    if sys.argv[1] == "devices":
        print(SIGHT + json.dumps(asdict(_find_devices())))
    else:
        _compile_tiny_program()
        print(COMPILED)
