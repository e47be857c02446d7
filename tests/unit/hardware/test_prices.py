from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.prices import cheapest, prices

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
    with pytest.raises(UserError, match=r"us-central1-a.*E-HARDWARE-011"):
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
    with pytest.raises(UserError, match=r"'zones'.*E-HARDWARE-013"):
        prices(written(tmp_path, "generation,zones,usd_per_chip_hour_on_demand,date\n"))
    with pytest.raises(UserError, match=r"'date'.*E-HARDWARE-014"):
        prices(written(tmp_path, "generation,zone,usd_per_chip_hour_on_demand\n"))


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="E-HARDWARE-012"):
        prices(str(tmp_path / "none.csv"))
