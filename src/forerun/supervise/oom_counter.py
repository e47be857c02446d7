"""The number of processes that the kernel killed because memory ran out, from the control group of this process.

The workers belong to the same group as their supervisor.
"""

from __future__ import annotations

from pathlib import Path

MARK = "the kernel killed it: out of memory"


def oom_kills(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of kills so far, or 0 if it is unknown. Version 2 of control groups includes subgroups."""
    return sum(_counted(file) for file in _files(proc, mounted))


def _files(proc: Path, mounted: Path) -> list[Path]:
    """Return the files that contain the counters of this process's control groups."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text("utf-8").splitlines()]
    except OSError:
        return []
    found = []
    for number, controllers, path in lines:
        inside = path.lstrip("/")
        if number == "0" and not controllers:
            found += [mounted / inside / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [mounted / "memory" / inside / "memory.oom_control"]
    return found


def _counted(file: Path) -> int:
    try:
        words = [line.split() for line in file.read_text("utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(parts[1]) for parts in words if len(parts) == 2 and parts[0] == "oom_kill" and parts[1].isdigit())
