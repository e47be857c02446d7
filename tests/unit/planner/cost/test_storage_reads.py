"""The requests of a job to a store in a bucket, from the job alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.planner.cost.storage_reads import planned_reads
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob

JOB = {"model": {"layers": 1, "embed": 16, "heads": 1, "vocab": 300}, "steps": 1000, "batch": 64, "sequence": 2048}


def resolved(store: str | None, vocab: int = 300, **data: Any) -> ResolvedJob:
    """Return a job with a store, without a look at the address."""
    model = JOB["model"] | {"vocab": vocab}  # type: ignore[operator]
    found = resolve_model(Job.model_validate(JOB | {"model": model, "data": {"path": "text.txt", **data}}))
    job = found.job
    return replace(found, job=job.model_copy(update={"data": job.data.model_copy(update={"store": store})}))


def test_a_local_store_has_no_requests() -> None:
    assert planned_reads(resolved(None), 1) is None
    assert planned_reads(resolved("/tmp/tokens"), 1) is None


def test_requests_of_a_store_in_a_bucket() -> None:
    """A row has four requests: tokens, borders of documents, and the checksums of both. Memory keeps few of 1 TiB."""
    found = planned_reads(resolved("gs://bucket/tokens"), 4)
    assert found is not None
    rows, blocks = found.orders
    assert rows.requests == pytest.approx(64 * 4, rel=0.01)
    assert blocks.requests == pytest.approx(rows.requests / 128, rel=0.01)  # 512 KiB of 4 KiB rows
    assert (found.load.hosts, found.chosen, found.advice.shuffle) == (4, "rows", "blocks")
    assert rows.usd_of_run == pytest.approx(rows.requests * 0.0004)


def test_a_large_vocabulary_has_four_bytes_per_token() -> None:
    small, large = (planned_reads(resolved("s3://bucket/tokens", vocab), 1) for vocab in (300, 100_000))
    assert small is not None
    assert large is not None
    assert (small.load.token_bytes, large.load.token_bytes) == (2, 4)


@pytest.mark.parametrize("data", [{"packing": "whole"}, {"validation": 0.1, "validation_by": "rows"}, {"cache_gib": 0}])
def test_what_blocks_cannot_help_with(data: dict[str, Any]) -> None:
    found = planned_reads(resolved("gs://bucket/tokens", **data), 1)
    assert found is not None
    assert found.advice.shuffle == "rows"
