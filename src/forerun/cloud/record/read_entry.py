"""Reading and writing of the files of a run's record. Every byte of a file may be damaged or forged."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from forerun.cloud.record.entries import VERSION
from forerun.errors import UserError

T = TypeVar("T")
MOST_BYTES = 16 << 20  # the largest entries name the result files of a run, or contain its job
_MOST_PROBLEMS = 3  # of one entry that its reason names


@dataclass(frozen=True)
class DamagedEntry:
    """A file of a record that does not contain a valid entry.

    Attributes:
      path: the address of the file.
      reason: what is wrong with its content, in one line.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.reason}"


def read_entry(kind: type[T], path: str, content: bytes) -> T | DamagedEntry:
    """Return the entry of type `kind` in a file, or what is wrong with it. Never raise an error for any content.

    Types are strict: a string is not a number, and NaN and Infinity are not accepted. Unknown keys are ignored.
    """
    if len(content) > MOST_BYTES:
        return DamagedEntry(path, f"it has {len(content):,} bytes, and an entry has at most {MOST_BYTES:,}")
    try:
        entry: T = _reader(cast(Any, kind)).validate_json(content, strict=True)
    except ValidationError as error:
        return DamagedEntry(path, _reason(error))
    except (ValueError, RecursionError) as error:
        return DamagedEntry(path, type(error).__name__)
    return entry


def write_entry(entry: Any) -> bytes:
    """Return the content of the file of an entry."""
    return json.dumps(dataclasses.asdict(entry), indent=1, sort_keys=True).encode() + b"\n"


def undamaged(entry: T | DamagedEntry | None) -> T | None:
    """Return the entry, or None if its file is absent or damaged."""
    return None if isinstance(entry, DamagedEntry) else entry


def require_undamaged(entry: T | DamagedEntry) -> T:
    """Return the entry. Raise UserError if its file is damaged."""
    if isinstance(entry, DamagedEntry):
        raise damaged_error(entry)
    return entry


def damaged_error(entry: DamagedEntry) -> UserError:
    """Return the error for a command that needs the entry."""
    return UserError(
        "E-CLOUD-092",
        f"{entry.path} is damaged",
        why=entry.reason,
        fix="check who may write to the bucket; forerun down deletes the run's resources and does not need the file",
    )


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _reason(error: ValidationError) -> str:
    """Return the first problems with their keys. The values are not repeated: they may be long."""
    problems = error.errors(include_url=False, include_context=False, include_input=True)
    for problem in problems:
        if problem["loc"] == ("version",):
            return f"its format has version {str(problem['input'])[:20]!r}; this forerun reads version {VERSION}"
    texts = [
        f"{'.'.join(str(key)[:50] for key in problem['loc'])}: {problem['msg']}" if problem["loc"] else problem["msg"]
        for problem in problems[:_MOST_PROBLEMS]
    ]
    return "; ".join(" ".join(text.split())[:200] for text in texts)
