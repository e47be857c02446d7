"""What every file of a checkpoint must be: its size and its digest.

The digest is XXH3 of 128 bits, over the digests of pieces of 32 MiB, so that threads can share one large file. It is
chosen by measurement (seconds of one core for 1 GiB in the page cache, reading included; Orbax's own restore of it
takes 1.5 to 2.7): XXH3 0.17 to 0.20, CRC-32C with the processor's instructions 0.28, zlib's CRC-32 0.45 to 0.60,
SHA-256 (by its own speed) 1.0. It finds faults, not forgers: who can write the
folder can also write its commit records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from forerun.checkpoint.patience import Away
from forerun.checkpoint.place import Place
from forerun.units import MIB, Bytes

PIECE_BYTES = 32 * MIB
THREADS = min(16, os.cpu_count() or 1)

Manifest: TypeAlias = Mapping[str, tuple[int, str]]


@dataclass(frozen=True)
class Damage:
    """The first file that is not what was committed."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def manifest_of(place: Place, folder: str) -> dict[str, tuple[int, str]]:
    """As the files below the folder are now."""
    sizes = place.sizes(folder)
    digests = _digests(place, folder, sizes)
    return {name: (sizes[name], digests[name]) for name in sorted(sizes)}


def damage(place: Place, folder: str, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> Damage | None:
    """Is every file there, and what it was? Of several hosts, `part` (which, of how many) looks at a share of them.

    A file that the manifest does not name is not looked at: nothing reads it. Raises `Away` if the place does not
    answer: that says nothing of the files.
    """
    try:
        sizes = place.sizes(folder)
    except Away:
        raise
    except OSError as error:
        return Damage(folder, _reason(error))
    for name, (size, _) in manifest.items():
        if name not in sizes:
            return Damage(name, "is missing")
        if sizes[name] != size:
            return Damage(name, f"has {Bytes(sizes[name])} ({sizes[name]}), {size} were committed")
    mine = {name: size for name, (size, _) in list(manifest.items())[part[0] :: part[1]]}
    try:
        digests = _digests(place, folder, mine)
    except Away:
        raise
    except OSError as error:
        return Damage(str(error.filename or folder).rpartition(f"/{folder}/")[2], _reason(error))
    wrong = next((name for name in mine if digests[name] != manifest[name][1]), None)
    return Damage(wrong, "its content is not what was committed (digest differs)") if wrong else None


def _digests(place: Place, folder: str, sizes: Mapping[str, int]) -> dict[str, str]:
    pieces = [(name, start) for name, size in sizes.items() for start in range(0, max(size, 1), PIECE_BYTES)]
    with ThreadPoolExecutor(THREADS, "digest") as threads:
        found = threads.map(lambda piece: _piece(place, f"{folder}/{piece[0]}", piece[1]), pieces)
        joined: dict[str, bytes] = dict.fromkeys(sizes, b"")
        for (name, _), digest in zip(pieces, found, strict=True):
            joined[name] += digest
    return {name: xxhash.xxh3_128_hexdigest(parts) for name, parts in joined.items()}


def _piece(place: Place, name: str, start: int) -> bytes:
    digest = xxhash.xxh3_128()
    for block in place.blocks(name, start, PIECE_BYTES):
        digest.update(block)
    return digest.digest()


def _reason(error: OSError) -> str:
    return f"cannot be read ({error.strerror or error})"
