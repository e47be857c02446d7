"""`forerun fetch`: download the results of a cloud run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.cloud.connection import files_of

if TYPE_CHECKING:
    from forerun.cloud.view.download import ResultFile

RUNS = "runs"


def run(args: argparse.Namespace) -> int:
    from forerun.cloud.view.download import download, result_files
    from forerun.errors import UserError
    from forerun.units import Bytes

    files = files_of(args)
    finished = files.finished()
    if finished is None:
        raise UserError(
            "E-CLOUD-078",
            f"the run in {files.address} has no results yet",
            why="it has not finished: cloud/finished.json does not exist",
            fix=f"see its state with forerun ps --all, and its curves with forerun report {files.address}",
        )
    folder = Path(args.to) if args.to else Path(RUNS) / files.address.rstrip("/").rpartition("/")[2]
    result = download(files.run_folder, result_files(finished, folder), folder, _tell)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    size = Bytes(result.size_bytes)
    print(f"{folder}: {len(result.downloaded) + len(result.present)} files, {size}, checksums verified")
    if result.present:
        print(f"  {len(result.present)} of them were complete before")
    if any(one.name.startswith("export/") for one in (*result.downloaded, *result.present)):
        print(f"  model: {folder / 'export'}; try it: forerun generate {folder / 'export'} Once")
    return 0


def _tell(file: ResultFile, received_bytes: int) -> None:
    from forerun.units import Bytes

    if sys.stderr.isatty():
        text = f"{file.path.name}: {Bytes(received_bytes)} of {Bytes(file.size_bytes)}"
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)
