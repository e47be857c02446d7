"""The operations of each device in a recording of the JAX profiler (an `xplane.pb` file).

TPUs have a plane per core with the lines `XLA Ops`, `Async XLA Ops` and `Steps`. GPUs have a plane per device with a
line per stream. On CPU, the operations are events of host threads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

DEVICE_PLANE = re.compile(r"/device:(TPU|GPU):\d+")
HOST_PLANE = "/host:CPU"
# Operations that only contain others.
CONTAINERS = ("while", "call", "conditional")
COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective|async-collective|send|recv|nccl)"
)
HOST_TRANSFER = re.compile(r"(MemcpyH2D|MemcpyD2H|infeed|outfeed|host-transfer)")
# Not fusions, whose names begin with that of an operation inside them: copy_bitcast_fusion computes.
COPY = re.compile(r"(copy|copy-start|copy-done|slice-start|slice-done|MemcpyD2D|MemcpyP2P)(\.\d+)?$")


@dataclass(frozen=True, slots=True)
class DeviceOperation:
    """One execution of one operation. `self_ns` is its time without that of the operations inside it."""

    name: str
    start_ns: float
    end_ns: float
    self_ns: float

    @property
    def kind(self) -> str:
        """Return collective, host transfer, copy or compute, by the name of the operation."""
        for kind, pattern in (("collective", COLLECTIVE), ("host transfer", HOST_TRANSFER), ("copy", COPY)):
            if pattern.match(self.name):
                return kind
        return "compute"


@dataclass(frozen=True)
class DeviceProfile:
    """The operations of one device. `hidden` ran beside them: asynchronous transfers of a TPU."""

    name: str
    operations: tuple[DeviceOperation, ...]
    hidden: tuple[DeviceOperation, ...] = ()
    steps_ns: tuple[float, ...] = field(default=())  # durations of steps, if the device reports them

    @property
    def start_ns(self) -> float:
        return min(one.start_ns for one in self.operations)

    @property
    def end_ns(self) -> float:
        return max(one.end_ns for one in self.operations)

    @property
    def busy_ns(self) -> float:
        """Return the time in which at least one operation ran."""
        total, until = 0.0, float("-inf")
        for one in sorted(self.operations, key=lambda one: one.start_ns):
            if one.end_ns > until:
                total += one.end_ns - max(one.start_ns, until)
                until = one.end_ns
        return total


def device_profiles(file: Path) -> list[DeviceProfile]:
    """Return the profile of each device that has operations in a recording."""
    return _profiles(ProfileData.from_file(str(file)))


def _profiles(data: Any) -> list[DeviceProfile]:
    planes = list(data.planes)
    devices = [_device(plane) for plane in planes if DEVICE_PLANE.fullmatch(plane.name)]
    found = [one for one in devices if one is not None]
    if found:
        return found
    return [one for plane in planes if plane.name == HOST_PLANE for one in _host_devices(plane)]


def _device(plane: Any) -> DeviceProfile | None:
    """Return the profile of a TPU or GPU, or None if the plane has no operations."""
    lines = {line.name: line for line in plane.lines}
    if "XLA Ops" in lines:
        operations = _nested(lines["XLA Ops"].events)
    else:
        streams = [line for name, line in lines.items() if name.startswith("Stream")]
        operations = [one for line in streams for one in _nested(line.events)]
    if not operations:
        return None
    hidden = _nested(lines["Async XLA Ops"].events) if "Async XLA Ops" in lines else []
    steps = [float(event.duration_ns) for event in lines["Steps"].events] if "Steps" in lines else []
    return DeviceProfile(plane.name, tuple(operations), tuple(hidden), tuple(steps))


def _host_devices(plane: Any) -> list[DeviceProfile]:
    """Return the profiles of CPU devices. Their operations are the events with the name of an HLO operation."""
    by_device: dict[int, list[DeviceOperation]] = defaultdict(list)
    for line in plane.lines:
        events: dict[int, list[Any]] = defaultdict(list)
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats:
                events[int(stats.get("device_ordinal", 0))].append(event)
        for device, found in events.items():
            by_device[device] += _nested(found)
    return [DeviceProfile(f"/device:CPU:{device}", tuple(by_device[device])) for device in sorted(by_device)]


def _nested(events: Iterable[Any]) -> list[DeviceOperation]:
    """Return the operations of one line. The time of an operation inside another one counts only for the inner."""
    timed = [(event.start_ns, event.start_ns + event.duration_ns, _name(event.name)) for event in events]
    timed.sort(key=lambda one: (one[0], -one[1]))
    inside = [0.0] * len(timed)
    stack: list[int] = []
    for number, (start, end, _) in enumerate(timed):
        while stack and timed[stack[-1]][1] <= start:
            stack.pop()
        if stack:
            inside[stack[-1]] += min(end, timed[stack[-1]][1]) - start
        stack.append(number)
    return [
        DeviceOperation(name, start, end, max(0.0, end - start - inner))
        for (start, end, name), inner in zip(timed, inside, strict=True)
        if end > start
    ]


def _name(text: str) -> str:
    """Return the name of an operation. A TPU records the HLO instruction: `%fusion.3 = bf16[8] fusion(...)`."""
    return text.removeprefix("%").partition(" = ")[0]


def is_container(name: str) -> bool:
    """Return whether an operation only contains others, such as a loop."""
    return name.split(".")[0].rstrip("0123456789") in CONTAINERS
