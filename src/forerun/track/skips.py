"""`skips.jsonl`: the steps that were left out and why, a line each, on the disk before the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from forerun.errors import UserError


class SkipFile:
    """A kill loses none: a line counts when it is whole, and it is forced to the disk before `add` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[int, str] = {}
        if path.exists():
            *whole, torn = path.read_bytes().split(b"\n")
            self.known = dict(_parsed(line, number, path) for number, line in enumerate(whole, 1))
            if torn:
                self._rewrite()

    def add(self, step: int, why: str) -> None:
        self.known[step] = why
        with self._path.open("ab") as out:
            out.write(_line(step, why))
            out.flush()
            os.fsync(out.fileno())
        _flush_folder(self._path.parent)

    def forget(self, steps: list[int]) -> None:
        if self.known.keys() & set(steps):
            self.known = {step: why for step, why in self.known.items() if step not in steps}
            self._rewrite()

    def _rewrite(self) -> None:
        part = self._path.with_name(f"{self._path.name}.part")
        with part.open("wb") as out:
            out.writelines(_line(step, why) for step, why in self.known.items())
            out.flush()
            os.fsync(out.fileno())
        part.replace(self._path)
        _flush_folder(self._path.parent)


def _line(step: int, why: str) -> bytes:
    return json.dumps({"step": step, "why": why}).encode() + b"\n"


def _parsed(line: bytes, number: int, path: Path) -> tuple[int, str]:
    try:
        said = json.loads(line)
        return int(said["step"]), str(said["why"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}, line {number} is not a step that was left out",
            why=repr(line[:80].decode(errors="replace")),
            fix=f"remove it: sed -i {number}d {path}",
        ) from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
