from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.hardware.show import chips_table, prices_table, slices_table

HARDWARE_PAGE = Path(__file__).parents[3] / "docs/reference/hardware.md"


def line_of(text: str, start: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.split()[:1] == [start])


@pytest.mark.parametrize("table", [chips_table, slices_table, prices_table])
def test_tables_fit_a_terminal(table: Callable[[], str]) -> None:
    text = table()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert max(len(line) for line in text.split("sources")[0].splitlines()) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "sources" in text
    assert "2026" in text


def test_rows() -> None:
    assert line_of(chips_table(), "v6e") == "v6e 918 1,836 32 31.25 1,640 800 1 8 128"
    assert line_of(chips_table(), "A100-80").startswith("A100-80 312 - 624 80 71.3 ")
    assert line_of(slices_table(), "v6e-8") == "v6e-8 8 8 1 250 v6e:2x4"
    assert line_of(prices_table(None, "us-central1-a"), "v6e") == "v6e us-central1-a - 2.7000 0.6518 2026-08-21"


def test_prices_of_one_zone_and_of_a_file(tmp_path: Path) -> None:
    assert "us-east1-d" not in prices_table(None, "us-central2-b")
    file = tmp_path / "mine.csv"
    file.write_text("generation,zone,usd_per_chip_hour_on_demand,date\nv6e,us-central1-a,0.5,2026-10-01\n")
    assert line_of(prices_table(str(file), "us-central1-a"), "v6e") == "v6e us-central1-a - 0.5000 - 2026-10-01"
    with raises_error("E-HARDWARE-011"):
        prices_table(None, "nowhere")


def test_the_documentation_shows_real_output() -> None:
    page = HARDWARE_PAGE.read_text()
    for block in chips_table().split("\n\n")[:2]:
        assert block in page
    assert prices_table(None, "us-central1-a") in page
    assert prices_table(None, None, ["lambda"]) in page


def test_rows_of_gpus() -> None:
    assert line_of(chips_table(), "H100") == "H100 989 1,979 1,979 80 71.2 3,352 450 64 50"
    assert line_of(chips_table(), "T4") == "T4 - - 130 16 13.0 320 - 16 -"
    assert line_of(slices_table(), "h100-8") == "h100-8 8 8 1 570 1x1x8"
    table = prices_table(None, None, ["lambda"])
    assert line_of(table, "H100") == "H100 lambda 4.29 4.19 4.09 3.99 - 2026-08-22"
    assert "v6e" not in table
    with raises_error("E-HARDWARE-021"):
        prices_table(None, None, ["lamda"])
