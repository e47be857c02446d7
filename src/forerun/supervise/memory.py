"""Whether the kernel has killed for want of memory: a counter of this process's control group, which workers share."""

from __future__ import annotations

from pathlib import Path

MARK = "the kernel killed it: out of memory"


def oom_kills(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """So far, in the group and (version 2) in groups below it; 0 where it cannot be known."""
    return sum(_counted(file) for file in _files(proc, mounted))


def _files(proc: Path, mounted: Path) -> list[Path]:
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
