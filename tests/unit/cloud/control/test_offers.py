"""The options of a run: zones in their order, prices of the table, and the API of each generation."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import forerun.hardware
from forerun.cloud.control.offers import slice_offers
from forerun.errors import UserError

TABLE = Path(forerun.hardware.__file__).parent / "tables" / "prices.csv"
ROW = {
    "hours": 2.0,
    "step_seconds": {"low": 0.4, "mid": 0.5, "high": 0.6},
    "spot": {"overhead": 0.25, "preemptions": 0.6},
    "program": "abc",
}


def table_price(generation: str, zone: str, column: str) -> float:
    lines = [line for line in TABLE.read_text("utf-8").splitlines() if not line.startswith("#")]
    (found,) = [row for row in csv.DictReader(lines) if (row["generation"], row["zone"]) == (generation, zone)]
    return float(found[column])


@pytest.mark.parametrize(
    ("capacity", "column"),
    [
        ("spot", "usd_per_chip_hour_spot"),
        ("on-demand", "usd_per_chip_hour_on_demand"),
        ("flex-start", "usd_per_chip_hour_on_demand"),
        ("reservation", "usd_per_chip_hour_on_demand"),
    ],
)
def test_zones_keep_their_order_and_have_the_prices_of_the_table(capacity: str, column: str) -> None:
    zones = ["us-central1-a", "europe-west4-b"]
    found = slice_offers("v5e-16", capacity, zones)  # type: ignore[arg-type]
    assert [one.zone for one in found] == zones
    for one in found:
        assert one.usd_per_hour == pytest.approx(16 * table_price("v5e", one.zone, column))
        assert (one.provider, one.hosts, one.capacity) == ("tpu", 4, capacity)


def test_slices_of_one_host_have_another_price_than_pods() -> None:
    """The table has v2 in europe-west4-a for $1.2375 per chip in a single host, and for $1.50 in a pod."""
    (single,) = slice_offers("v2-8", "on-demand", ["europe-west4-a"])
    (pod,) = slice_offers("v2-32", "on-demand", ["europe-west4-a"])
    assert (single.hosts, single.usd_per_hour) == (1, pytest.approx(4 * 1.2375))
    assert (pod.hosts, pod.usd_per_hour) == (4, pytest.approx(16 * 1.5))


def test_without_zones_the_cheapest_come_first() -> None:
    found = slice_offers("v6e-8", "spot")
    prices = [one.usd_per_hour for one in found]
    assert len(prices) == 4
    assert prices == sorted(prices)


def test_the_plan_of_a_spot_slice_contains_its_preemptions() -> None:
    (spot,) = slice_offers("v6e-8", "spot", ["us-east5-b"], row=ROW)
    assert (spot.hours, spot.step_seconds, spot.preemptions, spot.program) == (2.5, 0.5, 0.6, "abc")
    (on_demand,) = slice_offers("v6e-8", "on-demand", ["us-east5-b"], row=ROW)
    assert (on_demand.hours, on_demand.preemptions) == (2.0, None)


def test_compute_engine_is_used_where_it_must_be_or_where_the_user_wants_it() -> None:
    assert slice_offers("v6e-8", "spot", ["us-east5-b"], provider="compute")[0].provider == "compute"
    assert slice_offers("tpu7x-2x2x1", "spot", ["us-central1-c"], usd_per_hour=48.0)[0].provider == "compute"
    gpu = slice_offers("a3-highgpu-8g", "spot", ["us-central1-a"], usd_per_hour=88.5)
    assert (gpu[0].provider, gpu[0].hosts, gpu[0].usd_per_hour) == ("compute", 1, 88.5)


def test_a_gpu_machine_is_rented_with_its_plan() -> None:
    (one,) = slice_offers("h100-8", "spot", ["us-central1-a"], row=ROW)
    assert (one.provider, one.slice, one.hosts) == ("compute", "a3-highgpu-8g", 1)
    assert one.usd_per_hour == pytest.approx(52.6991)
    assert (one.hours, one.step_seconds, one.preemptions, one.program) == (2.5, 0.5, 0.6, "abc")
    (same,) = slice_offers("a3-highgpu-8g", "spot", ["us-central1-a"], row=ROW)
    assert same == one


def test_prices_of_gpu_machines() -> None:
    """The catalog has the machine for 9.46006 and its eight GPUs for 78.3724; spot 5.6759 and 47.0232."""
    (on_demand,) = slice_offers("a3-highgpu-8g", "on-demand", ["us-central1-a"])
    (spot,) = slice_offers("a3-highgpu-8g", "spot", ["us-central1-a"])
    assert (on_demand.usd_per_hour, spot.usd_per_hour) == (pytest.approx(87.8325), pytest.approx(52.6991))
    everywhere = slice_offers("g2-standard-12", "spot")
    assert [one.usd_per_hour for one in everywhere] == sorted(one.usd_per_hour for one in everywhere)
    assert len(everywhere) > 10


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("v5e-8", {"provider": "compute"}, "E-CLOUD-051"),
        ("tpu7x-2x2x1", {"provider": "tpu", "zones": ["us-central1-c"], "usd_per_hour": 48.0}, "E-CLOUD-051"),
        ("a3-highgpu-8g", {"zones": ["us-west9-a"]}, "E-CLOUD-052"),
        ("a3-highgpu-3g", {}, "E-CLOUD-052"),
        ("v6e-8", {"zones": ["us-west9-z"]}, "E-CLOUD-053"),
        ("4090-1", {}, "E-CLOUD-020"),
        ("h100-8x2", {}, "E-CLOUD-020"),
    ],
)
def test_a_slice_without_price_or_api_is_refused(name: str, options: dict[str, object], code: str) -> None:
    with pytest.raises(UserError) as raised:
        slice_offers(name, "spot", **options)  # type: ignore[arg-type]
    assert raised.value.code == code
