"""Counts and messages of the reads of a job."""

from __future__ import annotations

from pathlib import Path

from folder_stand_in import StandIn

from forerun.data.reads.store_reads import StoreReads


def test_counts_have_the_names_of_the_metrics_and_include_repetitions_of_the_driver(tmp_path: Path) -> None:
    class Repeating(StandIn):
        repeated_requests = 5

    reads, folder = StoreReads(), Repeating(tmp_path)
    reads.reader(folder)
    reads.reader(folder)  # the driver counts for the process, so two stores do not count twice
    Repeating.repeated_requests = 7
    reads.counts.add(requests=3, read_bytes=10, failed_requests=1)
    assert reads.figures() == {
        "data_requests": 5,
        "data_read_bytes": 10,
        "data_cache_hits": 0,
        "data_cache_misses": 0,
        "data_cache_errors": 0,
        "data_cache_damaged": 0,
        "data_damaged_blocks": 0,
        "data_failed_requests": 3,
    }


def test_the_first_damaged_block_is_told_once_and_the_total_at_the_end() -> None:
    reads = StoreReads()
    assert (reads.take_messages(), reads.total()) == ([], None)
    reads.counts.add(damaged_blocks=1)
    assert len(reads.take_messages()) == 1
    reads.counts.add(damaged_blocks=2, failed_requests=4, cache_damaged=1)
    reads.warn("the cache is full")
    assert reads.take_messages() == ["the cache is full"]
    total = reads.total()
    assert total is not None
    assert [word for word in total.split() if word.isdigit()] == ["3", "4", "1"]
