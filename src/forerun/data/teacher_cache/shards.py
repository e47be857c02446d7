"""A folder of shards, with a manifest of their identity and their digests.

A shard gets its final name when it is complete and flushed to the disk. Then its digest is added to the manifest, which
is replaced atomically. After a kill at any moment, the next process continues with the missing shards, and the result
has the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.data import checked_json
from forerun.data.teacher_cache.layout import Layout
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write, read_regular
from forerun.units import MIB, Bytes

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
        content, _ = checked_json.decode(read_regular(path, MAX_MANIFEST_BYTES))
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
