"""The list of local files that `forerun run` sends to the hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from forerun.cloud.setup.job_files import JOB_FILE, JobFile, JobFiles
from forerun.cloud.ssh.delivery import secrets_in
from forerun.units import Bytes

_SHOWN = 5  # names in the question


def file_summary(local: JobFiles) -> str:
    """Return number, bytes and first names of the files that travel, and of those that are skipped, as one line."""
    count = len(local.files)
    text = f"{count} local file{'s'[: count != 1]}, {Bytes(local.size_bytes)}"
    text += _names([file.name for file in local.files])
    if local.skipped:
        text += f"; {len(local.skipped)} skipped" + _names([file.name for file in local.skipped])
    return f"sent to the hosts: {text}; all: --list-files"


def print_file_list(job_file: Path, local: JobFiles) -> None:
    """Print every file that `forerun run` sends, and every file that the rules skip."""
    for file in (JobFile(JOB_FILE, job_file.resolve()), *local.files):
        size = Bytes(file.source.stat().st_size)
        print(f"{_line(file.name)}  {size}" + ("" if _is_at(file) else f"  from {_line(str(file.source))}"))
    for skipped in local.skipped:
        print(f"skipped: {_line(skipped.name)} ({skipped.reason})")
    variables = ", ".join(secrets_in(os.environ)) or "none"
    print(f"{len(local.files) + 1} files; variables of the environment: {variables}")
    print("forerun itself, its locked requirements and generated settings and keys of the run are sent too")


def _is_at(file: JobFile) -> bool:
    return file.source.as_posix().endswith(f"/{file.name}")


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    suffix = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ": " + ", ".join(map(_line, names[:_SHOWN])) + suffix


def _line(name: str) -> str:
    """Return a file name on one line: a name with a line break must not look like two files."""
    return name if name.isprintable() else json.dumps(name)
