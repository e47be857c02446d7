"""Cached teacher logits on disk: written once by `forerun cache`, read in the training of every student.

A cache is a folder of shards, with a manifest of their identity and their digests. A shard gets its final name when it
is complete and flushed to the disk. Then its digest is added to the manifest, which is replaced atomically. After a
kill at any moment, the next process continues with the missing shards, and the result has the same bytes.

A row has S positions with K kept tokens each. Its parts follow each other in this order:

- float16 values [S, K]: logits relative to the highest one
- ids [S, K], in the fewest bytes that hold them
- float32 tails [S, N]: the mass of all other tokens at each of N temperatures
- a CRC-32 of these bytes

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data import checked_json
from forerun.data.order.rows import Arrays
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write, read_regular
from forerun.units import MIB, Bytes

CHECK_BYTES = 4
SHARD_BYTES = 64 << 20  # limit of a shard (at least one row); a killed process loses at most one shard of work
SHARDS = 16  # minimum number of shards, if there are that many rows


@dataclass(frozen=True)
class Layout:
    """The sizes of a cache, and the encoding of its rows."""

    rows: int
    sequence: int
    top_k: int  # kept tokens of each position
    vocab: int
    temperatures: tuple[float, ...]  # of the tails

    @property
    def id_bytes(self) -> int:
        """Bytes of a token id: 2 for up to 65,536 tokens, 3 for up to 16.7 million, else 4."""
        return 2 if self.vocab <= 1 << 16 else 3 if self.vocab <= 1 << 24 else 4

    @property
    def row_bytes(self) -> int:
        kept = self.sequence * self.top_k
        return kept * (2 + self.id_bytes) + self.sequence * 4 * len(self.temperatures) + CHECK_BYTES

    @property
    def rows_per_shard(self) -> int:
        return max(1, min(SHARD_BYTES // self.row_bytes, math.ceil(self.rows / SHARDS)))

    @property
    def shards(self) -> int:
        return math.ceil(self.rows / self.rows_per_shard)

    @property
    def total_bytes(self) -> int:
        """Exact size of all shards."""
        return self.rows * self.row_bytes

    def rows_of(self, shard: int) -> range:
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def packed(self, values: NDArray[Any], ids: NDArray[Any], tails: NDArray[Any]) -> bytes:
        """Return the bytes of a row, from values [S, K], ids [S, K] and tails [S, N]."""
        content = b"".join(
            (
                np.ascontiguousarray(values, "<f2").tobytes(),
                np.ascontiguousarray(ids, "<u4").view(np.uint8).reshape(-1, 4)[:, : self.id_bytes].tobytes(),
                np.ascontiguousarray(tails, "<f4").tobytes(),
            )
        )
        assert len(content) + CHECK_BYTES == self.row_bytes
        return content + zlib.crc32(content).to_bytes(CHECK_BYTES, "little")

    def unpacked(self, row: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """Return float16 values [S, K], int32 ids [S, K] and float32 tails [S, N]; None if the row is damaged."""
        content = memoryview(row)[:-CHECK_BYTES]
        if len(row) != self.row_bytes or zlib.crc32(content) != int.from_bytes(row[-CHECK_BYTES:], "little"):
            return None
        kept = self.sequence * self.top_k
        values = np.frombuffer(content, "<f2", kept).reshape(self.sequence, self.top_k)
        narrow = np.frombuffer(content, np.uint8, kept * self.id_bytes, 2 * kept).reshape(-1, self.id_bytes)
        wide = np.zeros((kept, 4), np.uint8)
        wide[:, : self.id_bytes] = narrow
        ids = wide.view("<i4").reshape(self.sequence, self.top_k)
        tails = np.frombuffer(content, "<f4", offset=kept * (2 + self.id_bytes))
        return values, ids, tails.reshape(self.sequence, len(self.temperatures))


FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 * MIB  # a shard takes about 100 bytes
DRAFT = ".part"  # suffix of an incomplete shard


@dataclass(frozen=True)
class Identity:
    """Everything that the content of a cache depends on: rows, tokenizer, teacher, precision and layout."""

    data: str  # digest of the packed rows, in their order
    tokenizer: str
    teacher: str
    fingerprint: str  # of the teacher's weights
    compute: str  # dtype of the computation
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, content: dict[str, Any]) -> Identity:
        fields = {name: value for name, value in content.items() if name not in ("format", "shards")}
        layout = fields.pop("layout")
        return cls(**fields, layout=Layout(**{**layout, "temperatures": tuple(layout["temperatures"])}))


@dataclass(frozen=True)
class TeacherShards:
    """The shards of a cache."""

    folder: Path
    identity: Identity
    hashes: dict[int, str] = field(default_factory=dict)  # SHA-256 of the complete shards, by number

    def file(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.bin"

    @property
    def missing(self) -> list[int]:
        return [shard for shard in range(self.identity.layout.shards) if shard not in self.hashes]

    def write(self, shard: int, rows: Iterable[bytes]) -> None:
        """Write a shard atomically, then add its digest to the manifest."""
        digest, draft = hashlib.sha256(), self.file(shard).with_suffix(DRAFT)
        with draft.open("wb") as file:
            for row in rows:
                digest.update(row)
                file.write(row)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.file(shard))
        self.hashes[shard] = digest.hexdigest()
        self._write_manifest()

    def forget_damaged(self) -> list[int]:
        """Return the shards that differ from the manifest, and count them as missing from now on. Reads all shards."""
        bad = [shard for shard, digest in self.hashes.items() if hash_of(self.file(shard)) != digest]
        for shard in bad:
            del self.hashes[shard]
        return bad

    def begin(self) -> None:
        """Create the folder and the manifest, and remove incomplete shards of a killed process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for draft in self.folder.glob(f"*{DRAFT}"):
            draft.unlink()
        self._write_manifest()

    def _write_manifest(self) -> None:
        content = {
            **self.identity.to_json(),
            "shards": [self.hashes.get(n) for n in range(self.identity.layout.shards)],
        }
        atomic_write(self.folder / MANIFEST, checked_json.encode(content, indent=1))

    def require_disk_space(self) -> None:
        """Raise StorageError if the disk has too little space for the missing shards."""
        layout = self.identity.layout
        needed = sum(len(layout.rows_of(shard)) * layout.row_bytes for shard in self.missing)
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise StorageError(
                "E-DATA-074",
                f"{self.folder} has too little space for the cache: {Bytes(needed)} to write, {Bytes(free)} free",
                why=f"{layout.rows} rows x {layout.sequence} tokens x {layout.top_k} logits",
                fix="set a smaller distil.top_k, or distil.cache to a folder on another disk",
            )


def read_manifest(folder: Path) -> TeacherShards | None:
    """Return the shards that the manifest in `folder` records; None if it has no manifest.

    Raises:
      UserError: the manifest is damaged, or another version of forerun wrote it.
    """
    path = folder / MANIFEST
    try:
        content = checked_json.decode(read_regular(path, MAX_MANIFEST_BYTES))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}; this version of forerun reads {FORMAT}")
        hashes = {number: str(digest) for number, digest in enumerate(content["shards"]) if digest}
        return TeacherShards(folder, Identity.of(content), hashes)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "E-DATA-075",
            f"{path} is not the manifest of a teacher's cache",
            why=str(error),
            fix=f"remove {folder} and build it again: forerun cache JOB",
        ) from error


def hash_of(file: Path) -> str | None:
    """Return the SHA-256 of a file; None if it does not exist."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def differences(made: Identity, wanted: Identity) -> Iterator[str]:
    """Yield a text for each difference between an existing cache and the one that a job needs."""
    pairs = {
        "data": (made.data, wanted.data),
        "tokenizer": (made.tokenizer, wanted.tokenizer),
        "teacher": (made.teacher, wanted.teacher),
        "the teacher's weights": (made.fingerprint, wanted.fingerprint),
        "precision.compute": (made.compute, wanted.compute),
        "sequence": (made.layout.sequence, wanted.layout.sequence),
        "rows": (made.layout.rows, wanted.layout.rows),
        "distil.top_k": (made.layout.top_k, wanted.layout.top_k),
        "vocabulary": (made.layout.vocab, wanted.layout.vocab),
        "distil.temperature": (made.layout.temperatures, wanted.layout.temperatures),
    }
    for name, (then, now) in pairs.items():
        if then != now:
            yield f"{name}: {_value_text(then)} in the cache, {_value_text(now)} in the job"


def _value_text(value: object) -> str:
    return " and ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else str(value)


# ---- Reading. Each row is compared with its checksum ----


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
