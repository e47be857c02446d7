"""Verified download of a run's results from its bucket folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from forerun.cloud.record.entries import FinishEntry
from forerun.cloud.record.read_entry import require_undamaged
from forerun.cloud.record.run_files import CLOUD_FOLDER, RunFiles
from forerun.errors import StorageError, UserError
from forerun.files import sync_folder
from forerun.storage.folder import FileRange, Folder
from forerun.units import Bytes

RUNS = "runs"
CHUNK_BYTES = 8 << 20
CHUNKS_AT_ONCE = 8
RUN_FOLDER = f"{CLOUD_FOLDER}/run/"  # copies of the run folder on host 0; they are stored without this prefix


@dataclass(frozen=True)
class ResultFile:
    """One file of the results: its name in the bucket folder, its path on this machine, its size and its SHA-256."""

    name: str
    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class DownloadResult:
    """What a download did. `present` files were on this machine already, with the right content."""

    folder: Path
    downloaded: tuple[ResultFile, ...]
    present: tuple[ResultFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in (*self.downloaded, *self.present))


def result_files(finished: FinishEntry, folder: Path) -> tuple[ResultFile, ...]:
    """Return the files of a finished run. Names that would leave the folder are refused."""
    return tuple(
        ResultFile(name, folder / _relative(name), size, digest)
        for name, (size, digest) in sorted(finished.files.items())
    )


def download(
    source: Folder,
    files: tuple[ResultFile, ...],
    folder: Path,
    on_chunk: Callable[[ResultFile, int], None] = lambda file, received_bytes: None,
) -> DownloadResult:
    """Download files and compare their sizes and checksums. Files that are complete are not downloaded again.

    Args:
      source: the bucket folder of the run.
      files: what to download.
      folder: the folder that is written.
      on_chunk: called with each file and the bytes of it that are on this machine.

    Raises:
      UserError: A file exists with other content, or the disk is too small.
      StorageError: The content in the bucket is not the recorded one.
    """
    present = tuple(file for file in files if _is_present(file))
    wanted = tuple(file for file in files if file not in present)
    _require_space(folder, sum(file.size_bytes for file in wanted))
    for file in wanted:
        _download_file(source, file, on_chunk)
    return DownloadResult(folder, wanted, present)


def fetch_results(
    files: RunFiles, to: Path | None, on_chunk: Callable[[ResultFile, int], None] = lambda file, received_bytes: None
) -> DownloadResult:
    """Download the results of a finished run to a folder, by default to `runs/NAME`.

    Raises:
      UserError: The run has not finished, or see `download`.
    """
    finished = files.finished()
    if finished is None:
        raise UserError(
            "E-CLOUD-078",
            f"the run in {files.address} has no results yet",
            why="it has not finished: cloud/finished.json does not exist",
            fix=f"see its state with forerun ps --all, and its curves with forerun report {files.address}",
        )
    finished = require_undamaged(finished)
    folder = to or Path(RUNS) / files.address.rstrip("/").rpartition("/")[2]
    return download(files.run_folder, result_files(finished, folder), folder, on_chunk)


def _relative(name: str) -> Path:
    parts = PurePosixPath(name.removeprefix(RUN_FOLDER)).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in name or "\0" in name:
        raise UserError(
            "E-CLOUD-071",
            f"the record of the run names the file {name!r}",
            why="it would be written outside the folder of the run",
            fix="check who may write to the bucket; forerun never records such a name",
        )
    return Path(*parts)


def _is_present(file: ResultFile) -> bool:
    if not file.path.exists():
        return False
    if file.path.is_file() and file.path.stat().st_size == file.size_bytes and _sha256(file.path) == file.sha256:
        return True
    raise UserError(
        "E-CLOUD-072",
        f"{file.path} exists with other content",
        why=f"the run has a file of {Bytes(file.size_bytes)} with the SHA-256 {file.sha256[:16]}...",
        fix="choose another folder with --to, or move the file away",
    )


def _require_space(folder: Path, needed_bytes: int) -> None:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if needed_bytes > free:
        raise UserError(
            "E-CLOUD-073",
            f"{folder} has no space for the results",
            why=f"they need {Bytes(needed_bytes)}, and {Bytes(free)} are free",
            fix="free some space, or choose a folder on another disk with --to",
        )


def _download_file(source: Folder, file: ResultFile, on_chunk: Callable[[ResultFile, int], None]) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    part = file.path.with_name(f"{file.path.name}.part")
    digest, received = hashlib.sha256(), 0
    with open(part, "wb") as written:
        while received < file.size_bytes:
            starts = range(received, file.size_bytes, CHUNK_BYTES)[:CHUNKS_AT_ONCE]
            ranges = [FileRange(file.name, start, min(start + CHUNK_BYTES, file.size_bytes)) for start in starts]
            for wanted, content in zip(ranges, _read(source, file, ranges), strict=True):
                if len(content) != wanted.stop - wanted.start:
                    raise _damaged(source, file, "it is shorter than recorded")
                written.write(content)
                digest.update(content)
                received += len(content)
            on_chunk(file, received)
        written.flush()
        os.fsync(written.fileno())
    if digest.hexdigest() != file.sha256:
        part.unlink()
        raise _damaged(source, file, f"its SHA-256 is {digest.hexdigest()[:16]}..., not {file.sha256[:16]}...")
    os.replace(part, file.path)
    sync_folder(file.path.parent)


def _read(source: Folder, file: ResultFile, ranges: list[FileRange]) -> list[bytes]:
    try:
        return source.read_ranges(ranges)
    except FileNotFoundError:
        raise _damaged(source, file, "it does not exist") from None


def _damaged(source: Folder, file: ResultFile, why: str) -> StorageError:
    return StorageError(
        "E-CLOUD-074",
        f"{source.address}/{file.name} is not the file that the run has recorded",
        why=why,
        fix="check who may change the bucket; the newest checkpoint can be exported again: forerun export",
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
