"""Requests of a step against counts by hand, the lanes of hosts against their definition, and the recommendation."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest

from forerun.hardware.object_storage import HEADINGS, ReadLoad, StorageReads, advice, request_price, step_reads

TEN_GB = ReadLoad("gs", 64, 2048, 4, rows=1_220_703, documents=1_000_000, cache_bytes=500 << 20)
LARGE = ReadLoad("gs", 4096, 4096, 4, rows=3_662_109_375, documents=15 * 10**9, hosts=64, cache_bytes=8 << 30)


def test_requests_of_ten_gigabytes() -> None:
    """The checksums have 19.6 MB, of which 8 MiB stay in memory. The borders of documents stay in memory."""
    sums = 1 - (8 << 20) / ((1_220_703 * 8192 + 8_000_000) / 512)
    rows, blocks = step_reads(TEN_GB, "rows"), step_reads(TEN_GB, "blocks")
    assert rows.requests == pytest.approx(64 * (1 + sums), rel=1e-3)
    assert rows.read_bytes == pytest.approx(64 * (8192 + 4096 + sums * 4096), rel=1e-3)
    assert TEN_GB.sizes.block_rows == 18
    assert blocks.requests == pytest.approx(64 / 18 * (1 + sums), rel=1e-3)
    assert rows.usd_per_1000_steps == pytest.approx(rows.requests * 0.0004)
    assert rows.usd_of_run is None
    assert step_reads(replace(TEN_GB, steps=5000), "rows").usd_of_run == pytest.approx(rows.requests * 0.002)


def test_a_mask_adds_its_own_requests() -> None:
    small = replace(TEN_GB, rows=200_000)
    assert step_reads(replace(small, has_mask=True), "rows").requests == pytest.approx(
        2 * step_reads(small, "rows").requests
    )


def slots_of_a_lane(batch: int, lanes: int, rows: int) -> set[int]:
    return {(5 + lanes * time) % batch for time in range(rows)}


@pytest.mark.parametrize("batch", [48, 64, 100, 1024, 4096, 8192, 6144])
@pytest.mark.parametrize("hosts", [1, 4, 16])
def test_hosts_that_read_a_block(batch: int, hosts: int) -> None:
    load = replace(LARGE, batch=batch, hosts=hosts)
    sizes = load.sizes
    slots = slots_of_a_lane(batch, sizes.lanes, sizes.block_rows)
    assert load.hosts_per_block == pytest.approx(len({slot * hosts // batch for slot in slots}), abs=1)


def test_the_recommendation() -> None:
    assert advice(TEN_GB).shuffle == advice(LARGE).shuffle == "blocks"
    assert "instead of" in advice(TEN_GB).reason
    others = {
        "packed documents": replace(TEN_GB, can_use_blocks=False),
        "small data": replace(TEN_GB, rows=100_000),
        "small cache": replace(TEN_GB, cache_bytes=100 << 20),
        "no cache": replace(TEN_GB, cache_bytes=0),
        "slots of all hosts": replace(LARGE, weighted_parts=2),
    }
    assert {name: advice(load).shuffle for name, load in others.items()} == dict.fromkeys(others, "rows")
    assert len({advice(load).reason for load in others.values()}) == 4  # the two caches have the same reason


def test_a_cache_that_is_too_small_reads_a_block_for_each_row() -> None:
    small = replace(TEN_GB, cache_bytes=100 << 20)
    assert step_reads(small, "blocks").read_bytes > 10 * step_reads(small, "rows").read_bytes


def test_prices_have_a_date_and_a_source() -> None:
    for protocol in ("gs", "s3"):
        price = request_price(protocol)
        assert price is not None
        assert datetime.date.fromisoformat(price.date) <= datetime.date(2026, 11, 18)
        assert price.source.startswith("https://")
        assert price.usd_per_1000_reads == 0.0004
    assert request_price("other") is None
    assert step_reads(replace(TEN_GB, protocol="other"), "rows").usd_per_1000_steps is None


def test_the_table_and_its_json() -> None:
    reads = StorageReads.of(LARGE, "rows")
    found = reads.to_json()
    assert [one["shuffle"] for one in found["orders"]] == ["rows", "blocks"]
    assert found["orders"][0]["requests_per_step_and_host"] == pytest.approx(reads.orders[0].requests / 64)
    assert (found["shuffle"], found["recommended"], found["price"]["date"]) == ("rows", "blocks", "2026-09-20")
    assert all(len(cells) == len(HEADINGS) for cells in reads.cells())
