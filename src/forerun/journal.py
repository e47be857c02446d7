"""Append-only files of a run. Each line is a JSON object with a step.

A checkpoint records the length and the digest of each journal (`Seal`). A resumed run compares the file with the seal.
The lines up to the checkpoint's step must be the recorded bytes. Later lines belong to steps that are run again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from forerun.files import atomic_writer
from forerun.reporter import SILENT, Reporter

DAMAGED = ".damaged"
_BLOCK_BYTES = 1 << 20
_COMPARED_BYTES = 256  # of the last line that was read


@dataclass(frozen=True)
class Seal:
    """The length and the digest of a journal when the checkpoint of `step` was saved."""

    step: int
    bytes: int
    sha256: str


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the content of a journal's line, or None if the line is not a JSON object with a step."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return None
    return entry


class TailReader:
    """A reader of a growing file that returns each complete line once.

    It starts again at the beginning if the file was truncated or replaced, as by a resumed run. `generation` then
    increases by one.

    Args:
        path: The file, which need not exist yet.
        parse: Returns the content of a line, or None for a broken line, which is omitted.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any] | None] = entry_of) -> None:
        self._path, self._parse = path, parse
        self._at, self._node, self._last = 0, 0, b""
        self.generation = 0

    def rewind(self) -> None:
        """Return all lines again."""
        self._at, self._last = 0, b""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that were added since the last call."""
        try:
            with open(self._path, "rb") as file:
                self._find_position(file)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._at, self._last = self._at + len(line), line[-_COMPARED_BYTES:]
                    if (row := self._parse(line)) is not None:  # a resumed run reports and removes broken lines
                        yield row
        except FileNotFoundError:
            return

    def _find_position(self, file: IO[bytes]) -> None:
        """Move to the first byte that was not returned yet, or to the beginning of another file."""
        about = os.fstat(file.fileno())
        is_same = about.st_ino == self._node and about.st_size >= self._at
        if is_same:
            # The kernel reuses the numbers of removed files, and a truncated file may have grown again.
            file.seek(self._at - len(self._last))
            is_same = file.read(len(self._last)) == self._last
        if not is_same:
            self.generation += bool(self._at)
            self._at, self._node, self._last = 0, about.st_ino, b""
            file.seek(0)


class Snapshot:
    """The first `size` bytes of a journal. It can be read from another thread, and after the journal is closed."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`.

        Raises:
            OSError: The file is shorter, because another program truncated it.
        """
        content = b""
        while len(content) < end - start:
            block = os.pread(self._descriptor, end - start - len(content), start + len(content))
            if not block:
                raise OSError(errno.EIO, "a file of the run is shorter than what was written to it")
            content += block
        return content


class Journal:
    """An append-only file. Each line reaches the operating system before `append` returns.

    Opening removes the lines after the step `last`, and an incomplete line that a kill left. It always writes a new
    file, because a former owner of the run may still append to the old one.

    Training does not read its journals, so a damaged one does not stop it. Opening reports damage in one message and
    keeps the lines that can be read. Other lines are moved to a file with the suffix `.damaged`.

    Args:
        path: The file.
        last: The step of the checkpoint that the run resumes from, or 0 for a new run.
        seals: The seals of this file in the checkpoints up to `last`, the newest last.
        reporter: Receives a report of damage.
        is_entry: Returns whether the content of a line is valid. That it has a step is already known.
    """

    def __init__(
        self,
        path: Path,
        *,
        last: int,
        seals: Sequence[Seal] = (),
        reporter: Reporter = SILENT,
        is_entry: Callable[[dict[str, Any]], bool] = lambda entry: True,
    ) -> None:
        self._digest, self._bytes = hashlib.sha256(), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        report = ""
        if path.exists():
            report = self._reopen(path, last, seals, is_entry)
        elif seals and seals[-1].bytes:
            report = f"it is missing, so its lines up to step {last} are lost"
        if report:
            reporter.warn(f"{path}: {report}; the training does not read this file and continues")
        self._file = path.open("a+b")  # snapshots read it

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a newline."""
        self._file.write(line)
        self._file.flush()
        self._count(line)

    def seal(self, step: int) -> Seal:
        """Flush the file to the disk, and return its length and digest."""
        # A checkpoint must not record lines that a power loss could still remove.
        os.fsync(self._file.fileno())
        return Seal(step, self._bytes, self._digest.hexdigest())

    def snapshot(self) -> Snapshot:
        """Return the current content for reading."""
        return Snapshot(self._file.fileno(), self._bytes)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _count(self, content: bytes) -> None:
        self._digest.update(content)
        self._bytes += len(content)

    def _reopen(self, path: Path, last: int, seals: Sequence[Seal], is_entry: Callable[[dict[str, Any]], bool]) -> str:
        """Replace the file with its lines up to the step `last`. Return a description of its damage, or ""."""
        matching = matching_seals(path, seals)
        if not seals or seals[-1] not in matching:
            return self._salvage(path, last, max(matching, key=lambda seal: seal.bytes, default=None), seals, is_entry)
        with path.open("rb") as old, atomic_writer(path) as new:
            for block in _blocks(old, seals[-1].bytes):
                new.write(block)
                self._count(block)
        return ""

    def _salvage(
        self,
        path: Path,
        last: int,
        intact: Seal | None,
        seals: Sequence[Seal],
        is_entry: Callable[[dict[str, Any]], bool],
    ) -> str:
        """Keep the valid lines up to the step `last`. Return a description of the damage, or "".

        `intact` is the seal of the longest undamaged beginning.
        """
        position = intact_lines = kept = 0
        damaged: list[tuple[int, bytes]] = []
        with path.open("rb") as old, atomic_writer(path) as new:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    break  # incomplete because of a kill
                position += len(line)
                entry = entry_of(line)
                if entry is None or not is_entry(entry):
                    damaged.append((number, line))
                elif entry["step"] <= last:
                    new.write(line)
                    self._count(line)
                    kept = number
                if intact and position <= intact.bytes:
                    intact_lines = number
        if last <= 0:
            return ""  # a run without a checkpoint keeps nothing, so nothing is lost
        reports = []
        if damaged:
            aside = path.with_name(path.name + DAMAGED)
            with aside.open("ab") as out:
                out.writelines(line for _, line in damaged)
            reports.append(f"{len(damaged)} broken lines, the first is line {damaged[0][0]}, are now in {aside.name}")
        if seals:
            steps = f"steps {intact.step + 1 if intact else 1} to {last}"
            lines = f"lines {intact_lines + 1} to {kept} ({steps})" if kept > intact_lines else f"its lines of {steps}"
            reports.append(f"{lines} are not what the checkpoint of step {last} recorded")
        return "; ".join(reports)


def matching_seals(path: Path, seals: Sequence[Seal]) -> list[Seal]:
    """Return the seals that still match the beginning of the file, in one pass over the file."""
    found, digest, position = [], hashlib.sha256(), 0
    with path.open("rb") as file:
        for seal in sorted(seals, key=lambda seal: seal.bytes):
            for block in _blocks(file, seal.bytes - position):
                digest.update(block)
                position += len(block)
            if position == seal.bytes and digest.hexdigest() == seal.sha256:
                found.append(seal)
    return found


def _blocks(file: IO[bytes], count: int) -> Iterator[bytes]:
    """Yield the next `count` bytes in blocks, or less if the file ends."""
    while count and (block := file.read(min(count, _BLOCK_BYTES))):
        count -= len(block)
        yield block
