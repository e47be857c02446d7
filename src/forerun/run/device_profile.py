"""The operations of each device in a recording of the JAX profiler (an `xplane.pb` file), and their summary.

TPUs have a plane per core with the lines `XLA Ops`, `Async XLA Ops` and `Steps`. GPUs have a plane per device with a
line per stream. On CPU, the operations are events of host threads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from jax.profiler import ProfileData

from forerun.units import Seconds

SHOWN_OPERATIONS = 15
WIDEST_NAME = 60
KINDS = ("compute", "collective", "host transfer", "copy")
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
    planes = list(ProfileData.from_file(str(file)).planes)
    devices = [_device(plane) for plane in planes if DEVICE_PLANE.fullmatch(plane.name)]
    profiles = [profile for profile in devices if profile is not None]
    if profiles:
        return profiles
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


# ---- The summary of the profiles of all devices ----


@dataclass(frozen=True)
class OperationTotal:
    """All executions of one operation. Times are means per step and device."""

    name: str
    seconds: float
    calls: float
    kind: str


@dataclass(frozen=True)
class ProfileSummary:
    """The summary of a profile. All seconds are means per step and device."""

    devices: tuple[str, ...]
    steps: int
    step_seconds: float
    busy_seconds: float
    idle_seconds: float
    kind_seconds: dict[str, float]
    hidden_seconds: float
    operations: tuple[OperationTotal, ...]

    def text(self, title: str) -> str:
        """Return the summary as lines of text."""
        share = _share(self.step_seconds)
        lines = [
            title,
            f"  {self.steps} steps on {len(self.devices)} devices ({', '.join(self.devices[:4])}"
            f"{', ...' if len(self.devices) > 4 else ''})",
            f"  step       {Seconds(self.step_seconds)}",
            f"  busy       {Seconds(self.busy_seconds)}  {share(self.busy_seconds)}",
            f"  idle       {Seconds(self.idle_seconds)}  {share(self.idle_seconds)}",
        ]
        names = {"collective": "collectives", "host transfer": "host", "copy": "copies"}
        for kind, name in names.items():
            if seconds := self.kind_seconds.get(kind, 0.0):
                lines.append(f"  {name:<11}{Seconds(seconds)}  {share(seconds)}")
        if self.hidden_seconds:
            lines.append(f"  {'hidden':<11}{Seconds(self.hidden_seconds)} of transfers ran beside operations")
        lines += ["", "  time per step   share   calls  operation"]
        for one in self.operations:
            lines.append(
                f"  {Seconds(one.seconds)!s:>13}  {share(one.seconds):>6}  {one.calls:>6.4g}  {one.name[:WIDEST_NAME]}"
            )
        return "\n".join(lines) + "\n"


def _share(total: float) -> Callable[[float], str]:
    """Return a function that returns its argument as a share of `total`."""
    return lambda seconds: f"{seconds / total:.1%}" if total else "-"


def summary_of(profiles: Sequence[DeviceProfile], steps: int, shown: int = SHOWN_OPERATIONS) -> ProfileSummary:
    """Return the summary of the profiles of all devices, which recorded `steps` steps.

    The step time is the time from the first operation to the last one, divided by the number of steps. It thus includes
    the pauses between steps.
    """
    parts = steps * len(profiles)
    spans = [profile.end_ns - profile.start_ns for profile in profiles]
    busy = [profile.busy_ns for profile in profiles]
    kinds: dict[str, float] = defaultdict(float)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    kind_of: dict[str, str] = {}
    for profile in profiles:
        for one in profile.operations:
            if is_container(one.name):
                continue
            kind_of[one.name] = one.kind
            kinds[one.kind] += one.self_ns
            totals[one.name][0] += one.self_ns
            totals[one.name][1] += 1
    hidden = sum(one.self_ns for profile in profiles for one in profile.hidden)
    longest = sorted(totals, key=lambda name: -totals[name][0])[:shown]
    return ProfileSummary(
        devices=tuple(profile.name for profile in profiles),
        steps=steps,
        step_seconds=fmean(spans) / steps / 1e9,
        busy_seconds=fmean(busy) / steps / 1e9,
        idle_seconds=(fmean(spans) - fmean(busy)) / steps / 1e9,
        kind_seconds={kind: kinds[kind] / parts / 1e9 for kind in KINDS if kind in kinds},
        hidden_seconds=hidden / parts / 1e9,
        operations=tuple(
            OperationTotal(name, totals[name][0] / parts / 1e9, totals[name][1] / parts, kind_of[name])
            for name in longest
        ),
    )
