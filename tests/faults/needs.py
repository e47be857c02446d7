"""What tests need of the machine. Where it is missing they are skipped, but never in CI."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def need(available: object, name: str) -> None:
    """Skip the test if something is not available. In CI, fail."""
    if not available and os.environ.get("CI"):
        pytest.fail(f"{name} is missing, and CI must not skip this", pytrace=False)
    if not available:
        pytest.skip(f"needs {name}")


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of this size, which only root may do."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    need(subprocess.run(command, capture_output=True, check=False).returncode == 0, "root, to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(disk: Path, free_bytes: int = 0) -> Path:
    """Write a file that leaves so many bytes, and return it."""
    about = os.statvfs(disk)
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - free_bytes)
    return ballast
