"""The files in which wandb records a run without a server: `wandb/offline-run-*/run-*.wandb`.

wandb has no function that returns the last step of such a file. The format is that of the logs of LevelDB: blocks of
32 KiB, and records with a checksum, a length and a type. Each record contains a protocol buffer `Record`.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
FILE_HEADER_BYTES = 7
TAIL_BLOCKS = 8
RECORD_HEADER_BYTES = 7  # checksum 4, length 2, type 1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def last_step(folder: Path, token: str) -> int:
    """Return the last step of the run `token` in the offline files of `folder`, or 0."""
    return max((_last_step(path) for path in folder.glob(f"offline-run-*-{token}/run-*.wandb")), default=0)


def _last_step(path: Path) -> int:
    """Return the last step of a file, or 0. Only the end of a long file is read, unless it has no step."""
    with path.open("rb") as file:
        blocks = max(os.fstat(file.fileno()).st_size // BLOCK_BYTES - TAIL_BLOCKS, 0)
        file.seek(blocks * BLOCK_BYTES)
        found = max(_steps(file.read(), 0 if blocks else FILE_HEADER_BYTES), default=0)
        if found or not blocks:
            return found
        file.seek(0)
        return max(_steps(file.read(), FILE_HEADER_BYTES), default=0)


def _steps(data: bytes, start: int) -> Iterator[int]:
    """Yield the steps of a log. A record that a kill truncated is omitted."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for content in _records(data, start):
        record = messages.Record()
        with suppress(Exception):  # the exception for a damaged message depends on the release of protobuf
            record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                if item.key == "_step" or list(item.nested_key) == ["_step"]:
                    yield int(json.loads(item.value_json))


def _records(data: bytes, at: int) -> Iterator[bytes]:
    """Yield the complete records of a log from the position `at`. The end of an earlier record is omitted."""
    parts: bytes | None = None
    while at + RECORD_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:  # the rest of a block is padding
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        start = at + RECORD_HEADER_BYTES
        at = start + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at > len(data):
            return
        if kind in (FULL, FIRST):
            parts = b""
        if parts is None:
            continue
        parts += data[start:at]
        if kind in (FULL, LAST):
            yield parts
            parts = None
