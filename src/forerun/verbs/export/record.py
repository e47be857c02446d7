"""The file `exports.jsonl` in the folder of a run: one line for each export, for its report."""

from __future__ import annotations

import json
import os
import time

from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.verbs.export.write_model import Exported

FILE = "exports.jsonl"


def record_export(run: RunFolder, exported: Exported, reporter: Reporter) -> None:
    """Append a line about an export to the run's list. If it cannot be written, this is only reported."""
    try:
        line = {
            "unix_seconds": round(time.time(), 3),
            "step": exported.step,
            "folder": str(exported.folder),
            "format": format_name(exported),
            "bytes": sum(file.stat().st_size for file in exported.folder.rglob("*") if file.is_file()),
        }
        # One write of a complete line: a second export at the same time cannot mix its line with this one.
        descriptor = os.open(run.path / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        reporter.warn(f"the export is complete, but {run.path / FILE} was not updated: {error.strerror}")


def format_name(exported: Exported) -> str:
    """Return the format of an export, as the report shows it."""
    name = "PEFT adapter" if exported.is_adapter else "forerun" if exported.is_custom else "Hugging Face"
    return f"{name} and GGUF" if exported.gguf is not None else name
