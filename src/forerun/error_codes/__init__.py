"""Entries of all error codes: what each means, an example, and the fix.

The entries are the Markdown files of this folder, one for each area. The documentation includes the same files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CODE = re.compile(r"E-[A-Z]+-\d{3}")
_HEADING = re.compile(rf"^## ({CODE.pattern}): (.+)$", re.M)


@dataclass(frozen=True)
class Entry:
    """One error code and its Markdown text, without the heading."""

    code: str
    title: str
    text: str


@cache
def entries() -> dict[str, Entry]:
    """Return all entries by code, in the order of areas and numbers."""
    found = {}
    for file in sorted(files(__name__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".md"):
            _, *parts = _HEADING.split(file.read_text(encoding="utf-8"))
            for code, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                found[code] = Entry(code, title, text.strip())
    return found


def code_of(text: str) -> str:
    """Return a code as it is written in the entries: `e-data-17` and `[E-DATA-017]` are E-DATA-017."""
    area, _, number = text.strip("[] ").upper().rpartition("-")
    return f"{area}-{int(number):03d}" if number.isdecimal() and len(number) <= 3 else text
