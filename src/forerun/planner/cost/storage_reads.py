"""The requests of a job to a token store in a bucket, from the job alone: the data is not opened."""

from __future__ import annotations

from forerun.hardware.object_storage import ReadLoad, StorageReads
from forerun.resolve.resolved_job import ResolvedJob
from forerun.storage.address import Address
from forerun.units import GIB

# A TPU VM has a disk of 100 GB, and the cache gets a tenth of what is free.
USUAL_CACHE_BYTES = 8 * GIB
# The data is not open. For smaller data, both orders need fewer requests for checksums and borders of documents.
ASSUMED_DATA_BYTES, ASSUMED_DOCUMENT_TOKENS = 1 << 40, 1000


def planned_reads(resolved: ResolvedJob, hosts: int) -> StorageReads | None:
    """Return the requests of a step on so many hosts; None if the store is not in a bucket."""
    job = resolved.job
    data = job.data
    protocol = Address.of(data.store or "").protocol
    if protocol is None:
        return None
    token_bytes = 2 if resolved.vocab <= 1 << 16 else 4
    load = ReadLoad(
        protocol,
        job.batch,
        job.sequence,
        token_bytes,
        rows=max(1, ASSUMED_DATA_BYTES // (job.sequence * token_bytes)),
        documents=ASSUMED_DATA_BYTES // token_bytes // ASSUMED_DOCUMENT_TOKENS,
        hosts=min(hosts, job.batch),
        steps=job.steps,
        weighted_parts=len(data.mixture) if any(part.weight is not None for part in data.mixture.values()) else 0,
        can_use_blocks=_is_concatenated(resolved),
        is_assumed=True,
        cache_bytes=USUAL_CACHE_BYTES if data.cache_gib is None else int(data.cache_gib * GIB),
    )
    return StorageReads.of(load, data.shuffle)


def _is_concatenated(resolved: ResolvedJob) -> bool:
    """Return whether neighbouring rows are neighbours in the files. Without an answer in the job, they may be."""
    data = resolved.job.data
    by_rows = data.validation > 0 and data.validation_by == "rows"
    return data.packing != "whole" and not by_rows and not resolved.job.method.data_is_pairs
