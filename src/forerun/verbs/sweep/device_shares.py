"""Disjoint devices for the processes of a sweep, by the environment that each process gets.

This process opens no device itself: a TPU that it had opened could not be used by its children.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.devices import ORDER, ThisMachine

TPU_PORT = 8476  # the first port of libtpu; each process needs its own
# Chips of a process, as a box of the host's grid of chips. libtpu accepts only these shapes.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


@dataclass(frozen=True)
class DeviceShare:
    """The devices of one process: variables of its environment, and the cores that it may use (None: all)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    text: str = "all devices"


@dataclass(frozen=True)
class HostDevices:
    """The devices of this host: their platform, and their numbers as the platform counts them."""

    platform: str
    numbers: tuple[int, ...]


def host_devices(job: Job, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> HostDevices:
    """Return the devices that the job would use here, without opening them.

    Chips and GPUs are counted by their device files. The variables that hide some of them are respected.
    """
    known = os.environ if environment is None else environment
    machine = ThisMachine(root=root, environment=known)
    order = ORDER if job.device == "auto" else (job.device,) if isinstance(job.device, str) else job.device
    platform = next((name for name in order if machine.absence(name) is None), order[-1])
    if platform == "tpu":
        files = [*(root / "dev").glob("accel[0-9]*")] or [*(root / "dev/vfio").glob("[0-9]*")]
        return HostDevices(platform, _visible(known.get("TPU_VISIBLE_CHIPS"), len(files)))
    if platform == "gpu":
        files = [*(root / "dev").glob("nvidia[0-9]*")]
        return HostDevices(platform, _visible(known.get("CUDA_VISIBLE_DEVICES"), len(files)))
    return HostDevices("cpu", tuple(sorted(os.sched_getaffinity(0))))


def device_shares(devices: HostDevices, parallel: int) -> list[DeviceShare]:
    """Return the shares of `parallel` processes. A single process gets all devices, and an unchanged environment.

    Raises:
      UserError: there are fewer devices than processes, or they cannot be divided.
    """
    if parallel == 1:
        return [DeviceShare()]
    count = len(devices.numbers) // parallel
    if not count:
        noun = {"tpu": "TPU chips", "gpu": "GPUs", "cpu": "CPU cores"}[devices.platform]
        raise UserError(
            "E-COMMAND-062",
            f"--parallel {parallel} is more than the {len(devices.numbers)} {noun} here",
            why="each process of a sweep gets its own devices",
            fix=f"--parallel {max(1, len(devices.numbers))}, or without --parallel one run after the other",
        )
    if devices.platform == "cpu":
        count_text = f"{count} core{'s' if count != 1 else ''}"
        return [DeviceShare({}, cores, count_text) for cores in _parts(devices.numbers, parallel, count)]
    if devices.platform == "gpu":
        return [
            DeviceShare({"CUDA_VISIBLE_DEVICES": _listed(part)}, None, f"GPU {_listed(part)}")
            for part in _parts(devices.numbers, parallel, count)
        ]
    # A power of two is always a box of chips.
    count = max(size for size in _TPU_BOUNDS if size <= count)
    parts = _parts(devices.numbers, parallel, count)
    return [_tpu_share(part, TPU_PORT + number) for number, part in enumerate(parts)]


def _tpu_share(chips: Sequence[int], port: int) -> DeviceShare:
    """Return the environment in which libtpu sees only `chips`, as a slice of one process."""
    environment = {
        "TPU_VISIBLE_CHIPS": _listed(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return DeviceShare(environment, None, f"TPU chip {_listed(chips)}")


def _visible(setting: str | None, count: int) -> tuple[int, ...]:
    """Return the numbers in a variable such as `0,2`, or all numbers if it is not set or has other names."""
    parts = [part.strip() for part in (setting or "").split(",") if part.strip()]
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else tuple(range(count))


def _parts(numbers: Sequence[int], parallel: int, count: int) -> list[tuple[int, ...]]:
    return [tuple(numbers[at * count : (at + 1) * count]) for at in range(parallel)]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
