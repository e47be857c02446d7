"""Reader of cached teacher logits. Each row is compared with its checksum when it is read."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.rows import Arrays
from forerun.data.teacher_cache.shards import TeacherShards, read_manifest
from forerun.errors import UserError


class CachedTeacherRows:
    """Cached teacher logits as extra arrays of a mixture.

    It is pickled without open files. Files are not memory-mapped, for the reasons in `data/disk_array.py`.

    Args:
      folder: folder of the cache.
      names: names of the arrays for values, ids and tails.
      temperature: the student's temperature, which selects the tail.
      ids: dtype of the ids.
      first: row of the cache that is row 0 of the mixture.
    """

    def __init__(self, folder: Path, names: tuple[str, str, str], temperature: float, ids: Any, first: int = 0) -> None:
        self._arguments = (folder, names, temperature, np.dtype(ids), first)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedTeacherRows, self._arguments

    @cached_property
    def shards(self) -> TeacherShards:
        found = read_manifest(self._arguments[0])
        assert found is not None, "the cache existed when the run began"
        return found

    @cached_property
    def digest(self) -> str:
        """Digest of the complete cache."""
        import hashlib

        hashes = "".join(self.shards.hashes[shard] for shard in sorted(self.shards.hashes))
        return hashlib.sha256(hashes.encode()).hexdigest()[:12]

    @cached_property
    def _files(self) -> dict[int, int]:
        """File descriptors of the shards that were read, by shard."""
        return {}

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """Return values [n, S, K], ids [n, S, K] and tails [n, S] at the student's temperature, by their names."""
        _, names, temperature, dtype, first = self._arguments
        layout = self.shards.identity.layout
        kept = (len(rows), layout.sequence, layout.top_k)
        values, ids, tail = np.empty(kept, np.float16), np.empty(kept, dtype), np.empty(kept[:2], np.float32)
        served = layout.temperatures.index(temperature) if temperature in layout.temperatures else None
        for n, row in enumerate(rows.tolist()):
            one_values, one_ids, tails = self._row(first + row)
            values[n], ids[n] = one_values, one_ids
            tail[n] = 0 if served is None else tails[:, served]  # None: all tokens are kept, so no mass is left
        return dict(zip(names, (values, ids, tail), strict=True))

    def _row(self, row: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        layout = self.shards.identity.layout
        shard, inside = divmod(row, layout.rows_per_shard)
        if shard not in self._files:
            self._files[shard] = os.open(self.shards.file(shard), os.O_RDONLY)
        found = layout.unpacked(os.pread(self._files[shard], layout.row_bytes, inside * layout.row_bytes))
        if found is None:
            raise damaged(self.shards.file(shard), f"row {row} differs from its checksum")
        return found

    def __del__(self) -> None:
        for number in self.__dict__.get("_files", {}).values():
            os.close(number)


def require_complete(shards: TeacherShards) -> None:
    """Raise UserError if a shard is missing or has a wrong size. Their content is compared when it is read."""
    layout = shards.identity.layout
    if shards.missing:
        raise UserError(
            "E-DATA-072",
            f"{shards.folder} is not finished: {layout.shards - len(shards.missing)} of {layout.shards} shards",
            why="a student reads the rows in random order, so all shards must exist",
            fix="run forerun cache JOB, which continues where it stopped",
        )
    for shard in range(layout.shards):
        file, wanted = shards.file(shard), len(layout.rows_of(shard)) * layout.row_bytes
        have = file.stat().st_size if file.exists() else None
        if have != wanted:
            raise damaged(file, "it is missing" if have is None else f"it has {have} bytes, but {wanted} were written")


def damaged(file: Path, why: str) -> UserError:
    return UserError(
        "E-DATA-073",
        f"{file} is damaged",
        why=why,
        fix="run forerun cache JOB, which finds all damaged shards and writes them again",
    )
