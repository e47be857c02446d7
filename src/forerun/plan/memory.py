"""Reading the compiler's memory report: how many bytes of HBM a program needs, and what fills them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.units import Bytes

HBM, HOST = "default (color=0)", "cmem (color=5)"

_SPACE = re.compile(r"^Memory Space: (.+)$")
_TOTAL = re.compile(r"^Total bytes: (\d+)")
_PARAMETER = re.compile(r"^allocation \d+: size (\d+), parameter (\d+),(.*)$")


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
    """Bytes by memory space, from the text of `*-memory-usage-report.txt`."""
    totals: dict[str, int] = {}
    space = ""
    for line in report.splitlines():
        if found := _SPACE.match(line):
            space = found[1]
        elif (found := _TOTAL.match(line)) and space:
            totals[space] = int(found[1])
    return totals


def argument_bytes(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """HBM bytes by group of arguments, padding included, from `*-buffer-assignment.txt`."""
    sizes = dict.fromkeys(groups, 0)
    for line in assignment.splitlines():
        found = _PARAMETER.match(line)
        if found and " color " not in found[3]:
            sizes[groups[int(found[2])]] += int(found[1])
    return sizes


def memory_report(folder: Path, groups: Sequence[str]) -> MemoryReport:
    """From the compiler's dump of one program."""
    totals = space_totals(newest(folder, "memory-usage-report.txt").read_text())
    arguments = argument_bytes(newest(folder, "buffer-assignment.txt").read_text(), groups)
    return MemoryReport(
        peak_bytes=Bytes(totals[HBM]),
        weights_bytes=Bytes(arguments.get("weights", 0)),
        optimizer_bytes=Bytes(arguments.get("optimizer", 0)),
        batch_bytes=Bytes(arguments.get("batch", 0)),
        host_bytes=Bytes(totals.get(HOST, 0)),
    )


def newest(folder: Path, ending: str) -> Path:
    """The last file with that ending: the compiler may try again when a first try does not fit."""
    return max(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_mtime_ns)
