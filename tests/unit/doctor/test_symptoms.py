from __future__ import annotations

from pathlib import Path

from forerun.doctor.symptoms import SYMPTOMS, listing
from forerun.hardware.chips import chip_named
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import slice_named
from forerun.units import GIB

DOCTOR_PAGE = Path(__file__).parents[3] / "docs/reference/doctor.md"


def table() -> str:
    """Return the table of docs/reference/doctor.md."""
    rows = [f"| {entry.symptom} | {entry.cause} | {entry.fix} |" for entry in SYMPTOMS]
    return "\n".join(["| symptom | cause | fix |", "| --- | --- | --- |", *rows])


def test_the_documentation_has_the_same_table() -> None:
    page = DOCTOR_PAGE.read_text()
    assert table() in page
    section = page.partition("\n## Symptoms\n")[2].partition("\n## ")[0]
    assert sum(line.startswith("| ") for line in section.splitlines()) == len(SYMPTOMS) + 2


def test_cells_do_not_break_the_table() -> None:
    assert all("|" not in cell and "\n" not in cell for entry in SYMPTOMS for cell in vars(entry).values())
    assert len({entry.symptom for entry in SYMPTOMS}) == len(SYMPTOMS)


def test_the_listing_fits_a_terminal() -> None:
    assert max(len(line) for line in listing().splitlines()) <= 100
    assert all(entry.symptom in listing() for entry in SYMPTOMS)


def test_figures_are_those_of_the_tables() -> None:
    text = table()
    for name in ("v6e", "v5e"):
        assert f"{(chip_named(name).usable_bytes or 0) / GIB:.2f}" in text
    v5e, v6e = cheapest("v5e"), cheapest("v6e")
    assert v5e is not None
    assert v6e is not None
    assert f"8 x {v5e.usd_per_chip_hour_on_demand:.2f} = {8 * v5e.usd_per_chip_hour_on_demand:.2f}" in text
    assert f"v6e-1 is {v6e.usd_per_chip_hour_on_demand:.2f} and v6e-8 {8 * v6e.usd_per_chip_hour_on_demand:.2f}" in text
    assert (slice_named("v6e-1").devices, slice_named("v4-8").devices, slice_named("v3-8").devices) == (1, 4, 8)
