"""Where the local block cache of a host is, and how large it may become (`data.cache_gib`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forerun.config import schema
from forerun.data.reads.block_cache import BlockCache, geometry_within, stored_geometry
from forerun.data.reads.patient_reads import ReadCounts
from forerun.data.source.identity import cache_folder
from forerun.reporter import Reporter
from forerun.storage.address import Address
from forerun.units import Bytes

FREE_SHARE = 10  # the default is the free disk divided by this
# An existing cache keeps its size while it is between these shares of the default. The free disk is different at every
# start, and a cache that changes its size starts empty.
_KEPT_SHARES = (0.5, 1.25)
_GIB = 1 << 30


@dataclass(frozen=True)
class CacheSize:
    """The file of the local cache and its limit."""

    file: Path
    limit_bytes: int
    free_bytes: int  # free on its disk, together with what the cache has already
    is_default: bool

    @property
    def reason(self) -> str:
        """Where the number comes from, for the display."""
        if self.limit_bytes == 0:
            return "off: every block comes from the bucket"
        part = "a tenth of" if self.is_default else "of"
        return f"{part} {Bytes(self.free_bytes)} that are free for {self.file}"

    @property
    def warning(self) -> str | None:
        """What is wrong with the limit. A run continues with a disk that becomes full, so this is not an error."""
        if self.limit_bytes <= self.free_bytes:
            return None
        return (
            f"data.cache_gib is {Bytes(self.limit_bytes)}, but only {Bytes(self.free_bytes)} are free for {self.file}: "
            "when the disk is full, nothing more is cached"
        )


def cache_size(data: schema.Data) -> CacheSize:
    """Return where the cache of a job is and its limit: `data.cache_gib`, or a tenth of the free disk."""
    file = cache_folder() / "blocks" / "cache"
    free_bytes = _free_bytes(file)
    if data.cache_gib is not None:
        return CacheSize(file, int(data.cache_gib * _GIB), free_bytes, is_default=False)
    limit_bytes = free_bytes // FREE_SHARE
    stored = stored_geometry(file)
    if stored is not None:
        low, high = (share * limit_bytes for share in _KEPT_SHARES)
        limit_bytes = stored.size_bytes if low <= stored.size_bytes <= high else limit_bytes
    return CacheSize(file, limit_bytes if geometry_within(limit_bytes) else 0, free_bytes, is_default=True)


def bucket_cache(data: schema.Data) -> CacheSize | None:
    """Return the cache that a job uses; None if its store is on this machine, which needs none."""
    return cache_size(data) if data.store is not None and Address.of(data.store).is_bucket else None


def job_cache(data: schema.Data, counts: ReadCounts, reporter: Reporter) -> BlockCache | None:
    """Return the cache of a job, in the cache folder of this host; None if `data.cache_gib` is 0.

    Args:
      data: the data section of the job.
      counts: failures are added to it.
      reporter: receives a message for the user, once for each kind of failure.
    """
    size = cache_size(data)
    return BlockCache(size.file, size.limit_bytes, counts, reporter) if size.limit_bytes else None


def _free_bytes(file: Path) -> int:
    """Return the free bytes of the disk, with those that the cache file takes already; 0 if the disk fails."""
    folder = file.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        about = os.statvfs(folder)
        return about.f_bavail * about.f_frsize + (file.stat().st_blocks * 512 if file.exists() else 0)
    except OSError:
        return 0
