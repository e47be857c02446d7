"""A loop of small matmuls, compiled: the reservoir example with 4,096 units, 32 rows and 128 tokens, on one chip.

On v6e, the recurrent matrix stays in HBM and is read for each token. On v5e, the compiler keeps it on the chip, and
loading it into the matrix unit limits each token.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.prediction import ROOFLINE, simulation_of, step_time

SAMPLES = Path(__file__).parent / "samples"
UNITS, TOKENS = 4096, 128


def program(generation: str) -> Module:
    return parse(lzma.decompress((SAMPLES / f"reservoir_{generation}.txt.xz").read_bytes()).decode())


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_the_simulation_is_above_the_roofline(generation: str) -> None:
    slice = slice_named(f"{generation}-1")
    found = step_time(program(generation), slice)
    assert ROOFLINE not in found.doubts
    assert simulation_of(program(generation), slice).run().seconds == pytest.approx(found.mid_seconds)
    assert found.mid_seconds >= 1.3 * found.floor_seconds


def test_a_matrix_in_hbm_limits_each_token() -> None:
    least = TOKENS * 2 * UNITS * UNITS / 1640e9
    spent = simulation_of(program("v6e"), slice_named("v6e-1")).run()
    assert least <= spent.by_kind["memory"] <= 1.6 * least


def test_a_matrix_on_the_chip_is_loaded_into_the_matrix_units_for_each_token() -> None:
    """32 x 32 tiles of 128 x 128, each loaded in 64 cycles, on four matrix units at 1.5 GHz."""
    least = TOKENS * (32 * 32) * 64 / 4 / 1.5e9
    learned = 2 * 2 * (32 * TOKENS) * UNITS * UNITS / 197e12  # the read-out's first matrix: forward and its gradient
    spent = simulation_of(program("v5e"), slice_named("v5e-1")).run()
    assert least + learned <= spent.by_kind["matmul"] <= 1.3 * (least + learned)
