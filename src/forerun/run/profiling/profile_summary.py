"""The text summary of a profile: step time, busy and idle time, transfers, and the operations that take most time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from forerun.run.profiling.device_profile import DeviceProfile, is_container
from forerun.units import Seconds

SHOWN_OPERATIONS = 15
WIDEST_NAME = 60
KINDS = ("compute", "collective", "host transfer", "copy")


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
