"""A folder of shards and the manifest that says what they are and what their bytes must be.

A shard gets its name when it is whole and on the disk, and then its line in the manifest, which is replaced at once.
So a kill at any moment leaves a folder that the next start goes on from, and ends with the same bytes.
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
from forerun.data.taught.layout import Layout
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write, read_regular
from forerun.units import MIB, Bytes

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 * MIB  # 100 bytes a shard
DRAFT = ".part"


@dataclass(frozen=True)
class Identity:
    """Whose words, on which rows, as how many numbers. `data` is a digest of the packed rows in their order."""

    data: str
    tokenizer: str
    teacher: str
    fingerprint: str  # of the teacher's weights
    compute: str
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, content: dict[str, Any]) -> Identity:
        said = {name: value for name, value in content.items() if name not in ("format", "shards")}
        layout = said.pop("layout")
        return cls(**said, layout=Layout(**{**layout, "temperatures": tuple(layout["temperatures"])}))


@dataclass(frozen=True)
class Shards:
    """`hashes` are those of the shards that are done, by number."""

    folder: Path
    identity: Identity
    hashes: dict[int, str] = field(default_factory=dict)

    def file(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.bin"

    @property
    def missing(self) -> list[int]:
        return [shard for shard in range(self.identity.layout.shards) if shard not in self.hashes]

    def write(self, shard: int, rows: Iterable[bytes]) -> None:
        """The shard, whole, then its line in the manifest."""
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
        """Shards whose bytes are not those of the manifest: they count as missing from now on. Reads everything."""
        bad = [shard for shard, digest in self.hashes.items() if hash_of(self.file(shard)) != digest]
        for shard in bad:
            del self.hashes[shard]
        return bad

    def begin(self) -> None:
        """Make the folder, and remove what a kill has left of a shard in the making."""
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

    def require_room(self) -> None:
        layout = self.identity.layout
        needed = sum(len(layout.rows_of(shard)) * layout.row_bytes for shard in self.missing)
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise StorageError(
                f"{self.folder} has no room for the cache: {Bytes(needed)} to write, {Bytes(free)} free",
                why=f"{layout.rows} rows x {layout.sequence} tokens x {layout.top_k} logits",
                fix="a smaller distil.top_k, or distil.cache on another disk",
            )


def read_manifest(folder: Path) -> Shards | None:
    """What is there; None if nothing is."""
    path = folder / MANIFEST
    try:
        content, _ = checked_json.decode(read_regular(path, MAX_MANIFEST_BYTES))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, and this forerun knows {FORMAT}")
        hashes = {number: str(digest) for number, digest in enumerate(content["shards"]) if digest}
        return Shards(folder, Identity.of(content), hashes)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the manifest of a teacher's cache",
            why=str(error),
            fix=f"remove {folder} and make it again: forerun cache JOB",
        ) from error


def hash_of(file: Path) -> str | None:
    """None if there is no such file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def differences(made: Identity, wanted: Identity) -> Iterator[str]:
    """Where a cache is not what a job needs, in words."""
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
            yield f"{name}: {_said(then)} in the cache, {_said(now)} in the job"


def _said(value: object) -> str:
    return " and ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else str(value)
