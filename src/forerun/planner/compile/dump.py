"""The files that a compiler dumps, and a test whether they are complete.

The compiler writes the scheduled program, its buffers, their values, their live ranges and the memory report, in this
order, and closes each file before it opens the next one. It does not mark the end of a dump. But the files repeat each
other's figures, so an incomplete file is recognized by its content:

- The program ends with the closing brace of its entry.
- The sizes of the buffers add up to the total of the values, and each value has a line in the buffer assignment.
- The live ranges end with the last buffer of the peak, after which 0 bytes remain.
- The sizes of the memory spaces add up to the same total, and the last space has its closing empty lines.

A compiler whose dump lacks these figures gets the older rule: no file has changed for a moment.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.planner.memory import ASSIGNMENT, REPORT, Unreadable, newest, newest_file

SCHEDULED = "*after_optimizations.txt"
UNSCHEDULED = "*after_optimizations_before_buffer_assignment.txt"  # dump of a program that does not fit
TAKEN = "*after_optimizations_after_buffer_assignment.txt"  # written once the compiler has accepted the program
LIVE_RANGES = "*-live-range.txt"
VALUES = "*-buffer-assignment-values.txt"
SETTLED = "settled"  # the folder of the copies
UNKNOWN_FORMAT_SECONDS = 0.5  # since the last write, for a dump without closing figures

_TOTAL_USED = re.compile(r"^Total bytes used: (\d+)", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)", re.MULTILINE)
_SPACE_TOTAL = re.compile(r"^Total bytes: (\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class DumpTexts:
    """The texts of one dump. `values` is empty if the compiler writes no such file."""

    program: str
    assignment: str
    values: str
    live_ranges: str
    report: str

    @property
    def total_bytes(self) -> int | None:
        """The bytes of all memory spaces, or None if the dump has no total."""
        found = _TOTAL_USED.search(self.values) or _TOTAL_USED.search(self.assignment)
        return None if found is None else int(found[1])

    def missing_part(self) -> str | None:
        """Return which part of the dump has no end, or None if all are complete."""
        if self.total_bytes is None:
            return "the total"
        if not has_entry(self.program):
            return "the scheduled program"
        if sum(map(int, _ALLOCATION.findall(self.assignment))) != self.total_bytes or self.assignment[-1:] != "\n":
            return "the buffer assignment"
        if self.values and self.assignment.count("\n value: <") != self.values.count("\n<"):
            return "the values of the buffer assignment"
        last_line = self.values.rstrip().rpartition("\n")[2]
        if self.values and not (last_line.startswith(" from instruction: ") and self.values.endswith("\n")):
            return "the last value of the buffer assignment"
        if not self.live_ranges.rstrip().endswith("remaining: 0 bytes)"):
            return "the live ranges"
        if sum(map(int, _SPACE_TOTAL.findall(self.report))) != self.total_bytes or not self.report.endswith("\n\n\n"):
            return "the memory report"
        return None


def has_entry(program: str) -> bool:
    """Return whether a program has its last computation, the entry, with its closing brace."""
    return "\nENTRY " in program and program.rstrip().endswith("\n}")


def copy_dump(folder: Path, pid: int, ended: bool = False) -> Path:
    """Return a folder with copies of the program and its reports that are consistent with each other.

    Args:
        folder: The folder of the dump.
        pid: The compiler's process.
        ended: Whether the process has ended, so that it writes no more.

    Raises:
        Unreadable: A file is missing or may still be incomplete.
    """
    copies = folder / SETTLED
    copies.mkdir(exist_ok=True)
    before = [newest_file(folder, pattern) for pattern in (SCHEDULED, ASSIGNMENT, LIVE_RANGES, REPORT)]
    before += list(folder.glob(VALUES))
    written = [_version(path) for path in before]
    if not _open_files(pid).isdisjoint(map(os.path.realpath, before)):
        raise Unreadable("the compiler has not closed its files: the disk may be full or the machine busy")
    for path in before:
        shutil.copy(path, copies / path.name)
    if [_version(path) for path in before] != written:
        raise Unreadable("the compiler is writing")
    texts = DumpTexts(
        newest(copies, SCHEDULED),
        newest(copies, ASSIGNMENT),
        newest(copies, VALUES) if any(copies.glob(VALUES)) else "",
        newest(copies, LIVE_RANGES),
        newest(copies, REPORT),
    )
    if not has_entry(texts.program):
        raise Unreadable("the scheduled program has no end")
    quiet_seconds = (time.time_ns() - max(changed for changed, _ in written)) / 1e9
    is_known = texts.total_bytes is not None or any(copies.glob(VALUES))  # the file of the values has the total
    if ended or (not is_known and quiet_seconds >= UNKNOWN_FORMAT_SECONDS):
        return copies
    if not is_known:
        raise Unreadable("the compiler may still be writing")
    if (part := texts.missing_part()) is not None:
        raise Unreadable(f"{part} has no end")
    return copies


def _version(path: Path) -> tuple[int, int]:
    """Return values of a file that a write changes."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _open_files(pid: int) -> set[str]:
    """Return the paths that a process has open; none if it has ended."""
    found: set[str] = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
