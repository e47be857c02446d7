"""No predicted time of a thousand random programs is below the data sheet's rates."""

from __future__ import annotations

import pytest
from random_modules import RandomModule

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation

CHIPS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
PROGRAMS = 1000


@pytest.mark.parametrize("chip_name", CHIPS)
def test_no_prediction_is_below_its_roofline(chip_name: str) -> None:
    chip = chip_named(chip_name)
    assert chip.bf16_flops
    assert chip.hbm_bytes_per_second
    flops_per_second = chip.bf16_flops / chip.devices_per_chip
    bytes_per_second = chip.hbm_bytes_per_second / chip.devices_per_chip
    for seed in range(CHIPS.index(chip_name), PROGRAMS, len(CHIPS)):
        program = RandomModule(seed)
        module = parse(program.text)
        seconds = Simulation(module, chip_model_of(chip), chip_name).run().seconds
        assert seconds >= program.work.flops / flops_per_second, f"seed {seed}"
        assert seconds >= program.work.hbm_bytes / bytes_per_second, f"seed {seed}"
        assert seconds >= time_floor(module, PeakRates.of(chip)).seconds, f"seed {seed}"


def test_the_programs_have_work() -> None:
    programs = [RandomModule(seed) for seed in range(50)]
    assert sum("while(" in program.text for program in programs) > 15
    assert sum("copy-start(" in program.text for program in programs) > 15
    assert sum(program.work.flops > 0 for program in programs) > 25
    assert all(program.work.hbm_bytes > 0 for program in programs)
    assert RandomModule(7).text == RandomModule(7).text
