"""A range of bytes of a file in a folder."""

from __future__ import annotations

from typing import NamedTuple


class FileRange(NamedTuple):
    """The bytes `start` .. `stop - 1` of the file `name`."""

    name: str
    start: int
    stop: int
