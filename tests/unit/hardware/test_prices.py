from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.cloud.compute.machine_types import machine_shape
from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.gpu_names import gpus_of, usual_machine_type
from forerun.hardware.prices import (
    Price,
    all_machine_prices,
    cheapest,
    machine_prices,
    prices,
    provider_names,
    providers_of,
)
from forerun.hardware.slices import gpu_machines

HEAD = "generation,zone,kind,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date,source\n"


def written(path: Path, text: str) -> str:
    file = path / "prices.csv"
    file.write_text(text)
    return str(file)


def test_the_shipped_table() -> None:
    tpus = [price for price in prices() if chip_named(price.generation).is_tpu]
    known = {(price.generation, price.zone, price.kind): price for price in tpus}
    assert len(known) == len(tpus) == 70
    v6e = known["v6e", "us-central1-a", ""]
    assert (v6e.usd_per_chip_hour_on_demand, v6e.usd_per_chip_hour_spot) == (2.70, 0.6518)
    assert known["v5e", "us-central1-a", ""].usd_per_chip_hour_on_demand == 1.20
    assert known["v3", "us-east1-d", "single"].usd_per_chip_hour_spot is None
    assert {price.date for price in tpus} == {"2026-08-21"}
    assert {price.provider for price in tpus} == {"gcp"}


def test_v6e_is_not_sold_in_the_v4_zone() -> None:
    assert ("v6e", "us-central2-b") not in {(price.generation, price.zone) for price in prices()}
    assert cheapest("v6e", "us-central2-b") is None


def test_cheapest() -> None:
    spot = cheapest("v5e", spot=True)
    assert spot is not None
    assert (spot.zone, spot.usd_per_chip_hour_spot) == ("northamerica-northeast1-b", 0.177)
    on_demand = cheapest("v6e")
    assert on_demand is not None
    assert (on_demand.usd_per_chip_hour_on_demand, on_demand.zone) == (2.70, "us-east4-a")
    assert cheapest("tpu7x") is None


def test_v2_costs_more_on_several_hosts() -> None:
    single, pod = cheapest("v2"), cheapest("v2", hosts=4)
    assert single is not None
    assert pod is not None
    assert (single.usd_per_chip_hour_on_demand, pod.usd_per_chip_hour_on_demand) == (1.125, 1.5)


def test_no_spot_price_is_not_taken_for_a_free_one() -> None:
    assert cheapest("v3", "us-east1-d", spot=True) is None


def test_unknown_zone() -> None:
    with raises_error("E-HARDWARE-011", "us-central1-a"):
        cheapest("v6e", "us-centrall-a")


def test_override_replaces_and_adds(tmp_path: Path) -> None:
    text = HEAD + "v5litepod,us-central1-a,,0.9,,2026-10-01,my contract\ntpu7x,us-central1-a,,9,4,2026-10-01,\n"
    file = written(tmp_path, "# mine\n\n" + text)
    known = prices(file)
    assert len(known) == len(prices()) + 1
    mine = [price for price in known if (price.generation, price.zone) == ("v5e", "us-central1-a")]
    assert [(price.usd_per_chip_hour_on_demand, price.source) for price in mine] == [(0.9, "my contract")]
    added = cheapest("tpu7x", override_file=file)
    assert added is not None
    assert (added.usd_per_chip_hour_on_demand, added.source) == (9.0, file)


def test_override_without_a_kind_replaces_every_kind(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD + "v2,europe-west4-a,,0.5,,2026-10-01,\n")
    mine = [price for price in prices(file) if (price.generation, price.zone) == ("v2", "europe-west4-a")]
    assert [price.usd_per_chip_hour_on_demand for price in mine] == [0.5]


def test_optional_columns_may_be_left_out(tmp_path: Path) -> None:
    text = "generation,zone,usd_per_chip_hour_on_demand,date\nv6e,home,1,2026-10-01\n"
    found = cheapest("v6e", "home", override_file=written(tmp_path, text))
    assert found is not None
    assert found.usd_per_chip_hour_spot is None


@pytest.mark.parametrize(
    ("line", "column", "why"),
    [
        ("v6f,z,,1,,2026-10-01,", "generation", "known chips"),
        ("v6e,,,1,,2026-10-01,", "zone", "a zone is needed"),
        ("v6e,z,cube,1,,2026-10-01,", "kind", "single, pod or empty"),
        ("v6e,z,,$1,,2026-10-01,", "usd_per_chip_hour_on_demand", "not a number"),
        ("v6e,z,,,,2026-10-01,", "usd_per_chip_hour_on_demand", "price in USD is needed"),
        ("v6e,z,,-1,,2026-10-01,", "usd_per_chip_hour_on_demand", "positive"),
        ("v6e,z,,nan,,2026-10-01,", "usd_per_chip_hour_on_demand", "positive"),
        ("v6e,z,,1,x,2026-10-01,", "usd_per_chip_hour_spot", "not a number"),
        ("v6e,z,,1,,yesterday,", "date", "2026-08-21"),
        ("v6e,z,,1,,2026-10-01,a,b", "source", "more cells than the header"),
    ],
)
def test_mistakes_name_line_and_column(tmp_path: Path, line: str, column: str, why: str) -> None:
    file = written(tmp_path, f"# mine\n{HEAD}v6e,ok,,1,,2026-10-01,\n{line}\n")
    with pytest.raises(UserError) as error:
        prices(file)
    assert f"line 4, column {column}:" in error.value.what
    assert why in error.value.why


def test_wrong_columns(tmp_path: Path) -> None:
    with raises_error("E-HARDWARE-013", "'zones'"):
        prices(written(tmp_path, "generation,zones,usd_per_chip_hour_on_demand,date\n"))
    with raises_error("E-HARDWARE-014", "'date'"):
        prices(written(tmp_path, "generation,zone,usd_per_chip_hour_on_demand\n"))


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with raises_error("E-HARDWARE-012"):
        prices(str(tmp_path / "none.csv"))


# Prices of GPUs by provider. The expected values are from the catalog of 2026-08-22.

GPU_HEAD = "generation,provider,zone,chips,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date,source\n"


def found(chip: str, gpus: int, *providers: str, spot: bool = False, zone: str | None = None) -> Price:
    price = cheapest(chip, zone, spot=spot, chips_per_host=gpus, providers=providers)
    assert price is not None
    return price


def test_each_provider_has_its_price_by_the_number_of_gpus() -> None:
    assert found("H100", 8, "lambda").usd_per_chip_hour_on_demand == 3.99
    assert found("H100", 1, "lambda").usd_per_chip_hour_on_demand == 4.29
    nebius = found("H100", 8, "nebius", spot=True)
    assert (nebius.usd_per_chip_hour_on_demand, nebius.usd_per_chip_hour_spot) == (3.85, 2.15)
    assert (nebius.provider, nebius.zone, nebius.place, nebius.date) == ("nebius", "", "nebius", "2026-08-22")
    assert cheapest("H100", chips_per_host=2, providers=["nebius"]) is None


def test_pcie_cards_are_not_sold_as_sxm() -> None:
    """In the catalog, runpod's H100 is the PCIe card. The single H100 of Azure is an NVL card."""
    assert found("H100", 8, "runpod").usd_per_chip_hour_on_demand == 3.29
    assert found("H100-PCIe", 8, "runpod").usd_per_chip_hour_on_demand == 2.89
    assert cheapest("H100", chips_per_host=1, providers=["azure"]) is None
    # The machine costs 98.32 and has eight GPUs. The catalog counts twelve.
    assert found("H100", 8, "azure").usd_per_chip_hour_on_demand == pytest.approx(98.32 / 8)


@pytest.mark.parametrize(
    ("chip", "gpus", "machine"),
    [("H100", 8, "a3-highgpu-8g"), ("A100-80", 1, "a2-ultragpu-1g"), ("H200", 8, "a3-ultragpu-8g"), ("L4", 4, None)],
)
def test_google_cloud_includes_the_machine(chip: str, gpus: int, machine: str | None) -> None:
    own = found(chip, gpus, "gcp")
    expected = machine_prices(machine or "g2-standard-48")
    assert own.usd_per_chip_hour_on_demand * gpus == pytest.approx(
        min(one.usd_per_hour(spot=False) for one in expected.values())
    )
    assert own.zone in expected
    assert own.place == own.zone


def test_a_zone_selects_google_cloud() -> None:
    assert found("H100", 8).provider != "gcp"
    assert found("H100", 8, zone="us-central1-a").provider == "gcp"
    assert cheapest("4090", "us-central1-a") is None


def test_the_cheapest_provider_is_chosen_and_providers_restrict_it() -> None:
    every = {provider: cheapest("H100", chips_per_host=8, providers=[provider]) for provider in providers_of(prices())}
    known = {name: price.usd_per_chip_hour_on_demand for name, price in every.items() if price is not None}
    assert set(known) >= {"gcp", "lambda", "runpod", "nebius", "vast"}
    assert found("H100", 8).usd_per_chip_hour_on_demand == min(known.values())
    assert found("H100", 8, "gcp", "lambda").provider == "lambda"


def test_spot_costs_less_and_is_never_made_up() -> None:
    for price in prices():
        if not chip_named(price.generation).is_tpu and price.usd_per_chip_hour_spot is not None:
            assert 0 < price.usd_per_chip_hour_spot < price.usd_per_chip_hour_on_demand
    assert cheapest("4090", spot=True) is None


def test_unknown_providers_have_a_suggestion() -> None:
    with raises_error("E-HARDWARE-021") as error:
        cheapest("H100", providers=["lamda"])
    assert "lambda" in error.value.what
    assert "--provider lambda" in error.value.fix
    assert provider_names(" GCP, lambda,,gcp") == ("gcp", "lambda")
    assert provider_names(["Vast"]) == ("vast",)


def test_a_price_file_can_have_gpus_and_providers(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        GPU_HEAD
        + "RTX4090,shed,,,0.1,,2026-11-01,my own\n"
        + "h100-sxm,lambda,,8,2.5,1.5,2026-11-01,our contract\n"
        + "H100,gcp,us-central1-a,,5,,2026-11-01,our contract\n"
    )
    own = cheapest("4090", chips_per_host=4, override_file=str(file))
    assert own is not None
    assert (own.provider, own.usd_per_chip_hour_on_demand, own.source) == ("shed", 0.1, "my own")
    replaced = [
        one.usd_per_chip_hour_on_demand
        for one in prices(str(file))
        if (one.generation, one.provider, one.chips) == ("H100", "lambda", 8)
    ]
    assert replaced == [2.5]
    kept = cheapest("H100", chips_per_host=1, providers=["lambda"], override_file=str(file))
    assert kept is not None
    assert kept.usd_per_chip_hour_on_demand == 4.29
    # A row without a number of GPUs replaces the machines of every size in its zone.
    zone = [one for one in prices(str(file)) if (one.generation, one.zone) == ("H100", "us-central1-a")]
    assert [one.usd_per_chip_hour_on_demand for one in zone] == [5.0]
    file.write_text(GPU_HEAD + "H100,lambda,,many,2.5,,2026-11-01,\n")
    with raises_error("E-HARDWARE-015", "column chips"):
        prices(str(file))


def test_machine_types_of_google_cloud() -> None:
    for machine in gpu_machines():
        name = usual_machine_type(machine.chip.name, machine.chips)
        assert name is None or gpus_of(name) == (machine.chip.name, machine.chips)
    assert usual_machine_type("4090", 1) is None
    assert usual_machine_type("H200", 4) is None
    assert gpus_of("a3-highgpu-3g") is None
    assert gpus_of("e2-small") is None


# Prices of GPU machines. The expected values are from the catalog: the machine plus its GPUs.


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
