"""Bucket folders of the runs that this machine has started or listed.

The list is a convenience: it finds a run by its name after all its resources are deleted. Everything that decides about
machines and money is in the cloud. On a machine without the list, users give the address of the run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

MOST_RUNS = 50


def list_file(environment: Mapping[str, str] | None = None) -> Path:
    """Return the file with the list, in the user's configuration folder."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_CONFIG_HOME") or os.path.join(values.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "forerun" / "cloud-runs"


def known_runs(file: Path | None = None) -> tuple[str, ...]:
    """Return the folders of runs, such as `gs://bucket/runs/quickstart`. The newest comes first."""
    try:
        lines = (file or list_file()).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))


def remember_runs(folders: Iterable[str], file: Path | None = None) -> None:
    """Add folders of runs to the list. A list that cannot be written is not an error."""
    file, added = file or list_file(), list(folders)
    before = known_runs(file)
    if set(added) <= set(before):
        return
    lines = list(dict.fromkeys((*added, *before)))[:MOST_RUNS]
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        part.replace(file)
