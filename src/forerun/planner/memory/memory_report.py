"""Parser for the compiler's memory report: the HBM that a program needs, by groups of arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.planner.hlo import shapes_in
from forerun.units import Bytes

REPORT, ASSIGNMENT = "*-memory-usage-report.txt", "*-buffer-assignment.txt"
HBM = "default"
HOST = ("cmem", "host")  # memory spaces of offloaded values: the first by colour 5, the second by colour 4

_SPACE = re.compile(r"^Memory Space: (\w+)")
_TOTAL = re.compile(r"^Total bytes: (\d+) ")
_PARAMETER = re.compile(r"^allocation \d+: size (\d+), (.*?)parameter (\d+), (?:shape \|(.*?)\|)?")


class Unreadable(Exception):
    """The files are missing, incomplete, or not in a known format."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a program per device. In HBM, weights + optimizer + batch + working == peak."""

    peak_bytes: Bytes
    weights_bytes: Bytes
    optimizer_bytes: Bytes
    batch_bytes: Bytes
    host_bytes: Bytes  # offloaded to the host's memory

    @property
    def working_bytes(self) -> Bytes:
        """Gradients, activations and everything else that is not an argument of the step."""
        return Bytes(self.peak_bytes - self.weights_bytes - self.optimizer_bytes - self.batch_bytes)


def space_totals(report: str) -> dict[str, int]:
    """Return the bytes of each memory space, from the text of the memory-usage report."""
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
    """Return the HBM bytes of each group of arguments, including padding, from the text of the buffer assignment.

    `groups` has the group of each argument, in order.
    """
    sizes = dict.fromkeys(groups, 0)
    missing = set(range(len(groups)))
    for line in assignment.splitlines():
        if not (found := _PARAMETER.match(line)):
            continue
        number = int(found[3])
        if number >= len(groups):
            raise Unreadable(f"the buffer assignment has an argument {number}, but the step has only {len(groups)}")
        missing.discard(number)
        if "color" not in found[2]:  # buffers in HBM have no colour
            sizes[groups[number]] += int(found[1])
    if missing:
        raise Unreadable(f"the buffer assignment lacks {len(missing)} of the step's {len(groups)} arguments")
    return sizes


def argument_padding(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """Return the padding of each group of arguments: HBM bytes that only fill up tiles."""
    padding = dict.fromkeys(groups, 0)
    for line in assignment.splitlines():
        if (found := _PARAMETER.match(line)) and "color" not in found[2]:
            shapes = shapes_in(found[4] or "")
            padding[groups[int(found[3])]] += int(found[1]) - shapes[0].content_bytes if len(shapes) == 1 else 0
    return padding


def memory_report(folder: Path, groups: Sequence[str]) -> MemoryReport:
    """Return the memory of a program, from the compiler's dump.

    Args:
        folder: The folder of the dump.
        groups: The group of each argument of the step, in order: weights, optimizer or batch.

    Raises:
        Unreadable: A file is missing, incomplete, or not in a known format.
    """
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
        raise Unreadable(f"the arguments are larger than the peak of {report.peak_bytes}")
    return report


def newest(folder: Path, pattern: str) -> str:
    """Return the text of the newest file that matches a pattern."""
    return newest_file(folder, pattern).read_text("utf-8")


def newest_file(folder: Path, pattern: str) -> Path:
    """Return the newest file that matches a pattern. The compiler may write a second one if it retries."""
    files = list(folder.glob(pattern))
    if not files:
        raise Unreadable(f"there is no {pattern}")
    return max(files, key=lambda path: path.stat().st_mtime_ns)
