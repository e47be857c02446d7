"""Reading the compiler's memory report: how many bytes of HBM a program needs, and what fills them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.plan.hlo import shapes_in
from forerun.units import Bytes

REPORT, ASSIGNMENT = "*-memory-usage-report.txt", "*-buffer-assignment.txt"
HBM = "default"
HOST = ("cmem", "host")  # what was offloaded: the first by colour 5, the second by colour 4

_SPACE = re.compile(r"^Memory Space: (\w+)")
_TOTAL = re.compile(r"^Total bytes: (\d+) ")
_PARAMETER = re.compile(r"^allocation \d+: size (\d+), (.*?)parameter (\d+), (?:shape \|(.*?)\|)?")


class Unreadable(Exception):
    """The files are not there, not whole, or not in the form that we know."""


@dataclass(frozen=True)
class MemoryReport:
    """Per device. weights + optimizer + batch + working == peak."""

    peak_bytes: Bytes
    weights_bytes: Bytes
    optimizer_bytes: Bytes
    batch_bytes: Bytes
    host_bytes: Bytes

    @property
    def working_bytes(self) -> Bytes:
        """Gradients and activations: whatever is not an argument of the step."""
        return Bytes(self.peak_bytes - self.weights_bytes - self.optimizer_bytes - self.batch_bytes)


def space_totals(report: str) -> dict[str, int]:
    """Bytes by memory space, from the text of the memory-usage report."""
    totals: dict[str, int] = {}
    space = ""
    for line in report.splitlines():
        if found := _SPACE.match(line):
            space = found[1]
        elif (found := _TOTAL.match(line)) and space:
            totals[space] = int(found[1])
    if HBM not in totals or not report.endswith("\n\n"):
        raise Unreadable("the memory-usage report has no total for HBM, or no end")
    return totals


def argument_bytes(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """HBM bytes by group of arguments, padding included, from the text of the buffer assignment."""
    sizes = dict.fromkeys(groups, 0)
    missing = set(range(len(groups)))
    for line in assignment.splitlines():
        if not (found := _PARAMETER.match(line)):
            continue
        number = int(found[3])
        if number >= len(groups):
            raise Unreadable(f"the buffer assignment has an argument {number}, the step only {len(groups)} of them")
        missing.discard(number)
        if "color" not in found[2]:  # HBM has none
            sizes[groups[number]] += int(found[1])
    if missing:
        raise Unreadable(f"the buffer assignment lacks {len(missing)} of the step's {len(groups)} arguments")
    return sizes


def argument_padding(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """HBM bytes of each group of arguments that hold nothing: what fills the last tiles."""
    padding = dict.fromkeys(groups, 0)
    for line in assignment.splitlines():
        if (found := _PARAMETER.match(line)) and "color" not in found[2]:
            shapes = shapes_in(found[4] or "")
            padding[groups[int(found[3])]] += int(found[1]) - shapes[0].content_bytes if len(shapes) == 1 else 0
    return padding


def memory_report(folder: Path, groups: Sequence[str]) -> MemoryReport:
    """From the compiler's dump of one program. `groups` says what each argument of the step is, in order."""
    totals = space_totals(newest(folder, REPORT))
    arguments = argument_bytes(newest(folder, ASSIGNMENT), groups)
    report = MemoryReport(
        peak_bytes=Bytes(totals[HBM]),
        weights_bytes=Bytes(arguments.get("weights", 0)),
        optimizer_bytes=Bytes(arguments.get("optimizer", 0)),
        batch_bytes=Bytes(arguments.get("batch", 0)),
        host_bytes=Bytes(sum(totals.get(space, 0) for space in HOST)),
    )
    if report.working_bytes < 0:
        raise Unreadable(f"the arguments are larger than the whole of {report.peak_bytes}")
    return report


def newest(folder: Path, pattern: str) -> str:
    return newest_file(folder, pattern).read_text("utf-8")


def newest_file(folder: Path, pattern: str) -> Path:
    """The last file of that name: the compiler may write a second one when it tries again."""
    files = list(folder.glob(pattern))
    if not files:
        raise Unreadable(f"there is no {pattern}")
    return max(files, key=lambda path: path.stat().st_mtime_ns)
