"""Prices of GPUs by provider. The expected values are from the catalog of 2026-08-22."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.gpu_machine_types import gpus_of, usual_machine_type
from forerun.hardware.machine_prices import machine_prices
from forerun.hardware.price import Price
from forerun.hardware.prices import cheapest, prices, provider_names, providers_of
from forerun.hardware.slices import gpu_machines

HEAD = "generation,provider,zone,chips,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date,source\n"


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
    with pytest.raises(UserError, match="E-HARDWARE-021") as error:
        cheapest("H100", providers=["lamda"])
    assert "lambda" in error.value.what
    assert "--provider lambda" in error.value.fix
    assert provider_names(" GCP, lambda,,gcp") == ("gcp", "lambda")
    assert provider_names(["Vast"]) == ("vast",)


def test_a_price_file_can_have_gpus_and_providers(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        HEAD
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
    file.write_text(HEAD + "H100,lambda,,many,2.5,,2026-11-01,\n")
    with pytest.raises(UserError, match=r"column chips.*E-HARDWARE-015"):
        prices(str(file))


def test_machine_types_of_google_cloud() -> None:
    for machine in gpu_machines():
        name = usual_machine_type(machine.chip.name, machine.chips)
        assert name is None or gpus_of(name) == (machine.chip.name, machine.chips)
    assert usual_machine_type("4090", 1) is None
    assert usual_machine_type("H200", 4) is None
    assert gpus_of("a3-highgpu-3g") is None
    assert gpus_of("e2-small") is None
