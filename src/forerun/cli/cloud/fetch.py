"""`forerun fetch`: download the results of a cloud run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import files_of
from forerun.safe_text import raw_stream
from forerun.verbs.option_types import Folder, Project

if TYPE_CHECKING:
    from forerun.cloud.view.download import ResultFile

LINE_COLUMNS = 79


@options_of("forerun.verbs.cloud_runs:fetch_run")
def fetch(name: str, *, to: Folder | None = None, project: Project | None = None) -> int:
    """Download the results of a cloud run, and compare their checksums."""
    from forerun.cloud.record.run_files import EXPORT_FOLDER
    from forerun.cloud.view.download import fetch_results
    from forerun.units import Bytes

    result = fetch_results(files_of(name, project), Path(to) if to else None, _tell)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=raw_stream(sys.stderr), flush=True)
    files = (*result.downloaded, *result.present)
    print(f"{result.folder}: {len(files)} files, {Bytes(result.size_bytes)}, checksums verified")
    if result.present:
        print(f"  {len(result.present)} of them were complete before")
    if any(one.name.startswith(f"{EXPORT_FOLDER}/") for one in files):
        print(f"  try the model: forerun generate {result.folder / EXPORT_FOLDER} Once")
    return 0


def _tell(file: ResultFile, received_bytes: int) -> None:
    from forerun.safe_text import clean
    from forerun.units import Bytes

    if sys.stderr.isatty():
        text = clean(f"{file.path.name}: {Bytes(received_bytes)} of {Bytes(file.size_bytes)}")
        print(f"\r\x1b[K{text[:LINE_COLUMNS]}", end="", file=raw_stream(sys.stderr), flush=True)
