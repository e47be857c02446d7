"""Finding and reading the documents: one text file, or every text file under a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forerun.errors import UserError, did_you_mean

TEXT_SUFFIXES = (".txt", ".md", "")


def local_path(place: str, *, key: str) -> Path:
    """`place` as an existing local path; `key` is the job's key that named it."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", place):
        scheme = place.split("://")[0]
        raise UserError(
            f"{key}: {scheme}:// addresses are not supported yet",
            why=f"{place} is not a local path",
            fix=f"copy it to this machine and set {key} to the copy" + _copy_command(scheme, place),
        )
    path = Path(place).expanduser()
    if not path.exists():
        near = did_you_mean(path.name, _names(path.parent))
        raise UserError(
            f"{key}: {place} does not exist",
            why=f"looked for {path.absolute()}",
            fix=f"did you mean {path.parent / near}?" if near else f"set {key} to an existing file or folder",
        )
    return path


def documents(place: str) -> list[Path]:
    """The files that are documents: the file itself, or all text under the folder, sorted by relative path.

    In a folder these are *.txt, *.md and files without a suffix; hidden files and folders are left out.
    """
    path = local_path(place, key="data.path")
    if path.is_file():
        return [path]
    found = sorted(_text_files(path), key=lambda file: file.relative_to(path).as_posix())
    if not found:
        raise UserError(
            f"data.path: no text in {place}",
            why="no *.txt, *.md or suffix-less file in it or in any folder below it",
            fix="put the text there, or set data.path to one file (any suffix)",
        )
    return found


def read(path: Path) -> str:
    """The document's text, without a byte order mark; line ends stay as they are."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read", why=error.strerror or str(error), fix=f"chmod +r {path}, or move it away"
        ) from error
    return decoded(raw, path)


def decoded(raw: bytes, path: Path | str) -> str:
    """`raw` as text without a byte order mark; `path` is where it came from."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text",
            why=f"byte {error.start} is 0x{raw[error.start]:02x}: {error.reason}",
            fix=f"if it is text: iconv -f latin1 -t utf-8 {path} > fixed.txt; if not, move it out of data.path",
        ) from error


def _text_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in files if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in TEXT_SUFFIXES]
    return found


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _copy_command(scheme: str, place: str) -> str:
    return {
        "gs": f": gcloud storage cp -r {place} data/",
        "s3": f": aws s3 cp --recursive {place} data/",
        "http": f": curl -LO {place}",
        "https": f": curl -LO {place}",
    }.get(scheme, "")
