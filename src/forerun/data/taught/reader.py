"""A student's view of a cache: rows by number, each proven by its checksum as it is read."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.rows import Arrays
from forerun.data.taught.shards import Shards, read_manifest
from forerun.errors import UserError


class Taught:
    """Arrays for rows `first` .. of a cache. Not a memory map, for the reasons in `data/ondisk.py`; it travels to
    another process as its folder's name."""

    def __init__(self, folder: Path, names: tuple[str, str, str], temperature: float, ids: Any, first: int = 0) -> None:
        self._said = (folder, names, temperature, np.dtype(ids), first)

    def __reduce__(self) -> tuple[Any, ...]:
        return Taught, self._said

    @cached_property
    def shards(self) -> Shards:
        found = read_manifest(self._said[0])
        assert found is not None, "it was there when the run began"
        return found

    @cached_property
    def digest(self) -> str:
        """Of all that is in the cache."""
        import hashlib

        said = "".join(self.shards.hashes[shard] for shard in sorted(self.shards.hashes))
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @cached_property
    def _files(self) -> dict[int, int]:
        return {}

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """Values [n, S, K], ids [n, S, K] and the tail [n, S] at the student's temperature, by their names."""
        _, names, temperature, dtype, first = self._said
        layout = self.shards.identity.layout
        kept = (len(rows), layout.sequence, layout.top_k)
        values, ids, tail = np.empty(kept, np.float16), np.empty(kept, dtype), np.empty(kept[:2], np.float32)
        served = layout.temperatures.index(temperature) if temperature in layout.temperatures else None
        for n, row in enumerate(rows.tolist()):
            one_values, one_ids, tails = self._row(first + row)
            values[n], ids[n] = one_values, one_ids
            tail[n] = 0 if served is None else tails[:, served]  # none: the whole vocabulary, which has no tail
        return dict(zip(names, (values, ids, tail), strict=True))

    def _row(self, row: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        layout = self.shards.identity.layout
        shard, inside = divmod(row, layout.rows_per_shard)
        if shard not in self._files:
            self._files[shard] = os.open(self.shards.file(shard), os.O_RDONLY)
        found = layout.unpacked(os.pread(self._files[shard], layout.row_bytes, inside * layout.row_bytes))
        if found is None:
            raise damaged(self.shards.file(shard), f"row {row} is not what was written: its checksum differs")
        return found

    def __del__(self) -> None:
        for number in self.__dict__.get("_files", {}).values():
            os.close(number)


def require_whole(shards: Shards) -> None:
    """Every shard is there and as long as it must be; what is in it is proven when it is read."""
    layout = shards.identity.layout
    if shards.missing:
        raise UserError(
            f"{shards.folder} is not finished: {layout.shards - len(shards.missing)} of {layout.shards} shards",
            why="a student reads it in an order of its own, so all of it must be there",
            fix="forerun cache JOB goes on where it stopped",
        )
    for shard in range(layout.shards):
        file, wanted = shards.file(shard), len(layout.rows_of(shard)) * layout.row_bytes
        have = file.stat().st_size if file.exists() else None
        if have != wanted:
            raise damaged(file, "it is gone" if have is None else f"it has {have} bytes, and {wanted} were written")


def damaged(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} is damaged", why=why, fix="forerun cache JOB finds all damaged shards and makes them again"
    )
