"""Prices of GPU machines. The expected values are from the catalog: the machine plus its GPUs."""

import pytest

from forerun.cloud.compute.machine_types import machine_shape
from forerun.hardware.machine_prices import all_machine_prices, machine_prices


def test_prices_by_zone() -> None:
    found = machine_prices("a3-highgpu-8g")["us-central1-a"]
    assert found.usd_per_hour(spot=False) == pytest.approx(9.46006 + 78.3724, abs=1e-3)
    assert found.usd_per_hour(spot=True) == pytest.approx(5.6759 + 47.0232, abs=1e-3)
    assert machine_prices("a2-highgpu-1g")["us-central1-f"].usd_per_hour(spot=False) == pytest.approx(0.73948 + 2.93391)


def test_unknown_machines_have_no_price() -> None:
    assert machine_prices("a3-highgpu-3g") == {}


def test_every_row_is_a_machine_that_can_be_rented() -> None:
    for price in all_machine_prices():
        shape = machine_shape(price.machine_type)
        assert shape.chips > 0
        assert 0 < price.usd_per_hour(spot=True) <= price.usd_per_hour(spot=False)


def test_more_gpus_cost_more() -> None:
    for zone, single in machine_prices("a3-highgpu-1g").items():
        eight = machine_prices("a3-highgpu-8g")[zone]
        assert eight.usd_per_hour(spot=False) == pytest.approx(8 * single.usd_per_hour(spot=False), rel=0.01)
