"""The kernels of experts in a program that libtpu compiled for v5e: two grouped products, forward and backward.

8,192 rows in 32 groups, from 1,024 inputs to 768 and back, in jax 0.10.2. Each product has three kernels: itself, and
the gradients of its rows and of its weights.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.grouped_cost import GroupedShape, grouped_shape
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation

SAMPLE = Path(__file__).parent / "samples" / "v5e_grouped_matmuls.hlo.xz"
ROWS, GROUPS, EMBED, WIDTH = 8192, 32, 1024, 768
FLOPS = 2.0 * ROWS * EMBED * WIDTH  # of one kernel


@cache
def program() -> Module:
    return parse(lzma.decompress(SAMPLE.read_bytes()).decode())


def test_the_shapes_of_all_kernels() -> None:
    entry = program().computations[program().entry]
    found = [shape for x in entry.instructions if x.op == "custom-call" and (shape := grouped_shape(entry, x))]
    into, back = GroupedShape(GROUPS, ROWS, EMBED, WIDTH, 128), GroupedShape(GROUPS, ROWS, WIDTH, EMBED, 128)
    outer, other = GroupedShape(GROUPS, ROWS, EMBED, WIDTH, 512), GroupedShape(GROUPS, ROWS, WIDTH, EMBED, 512)
    assert sorted(map(str, found)) == sorted(map(str, [into, into, back, back, outer, other]))
    assert {shape.flops for shape in found} == {FLOPS}


def test_tiles_that_two_groups_share_count_twice() -> None:
    """64 tiles of 128 rows, and up to one more for each of the 31 borders. A unit of 128 divides all dimensions."""
    assert GroupedShape(GROUPS, ROWS, EMBED, WIDTH, 128).unit_flops(128) == pytest.approx(FLOPS * 95 / 64)


def test_the_simulation_counts_the_flops_and_knows_all_kernels() -> None:
    chip = chip_named("v5e")
    spent = Simulation(program(), chip_model_of(chip), "v5e").run()
    assert spent.flops["matmul"] == 6 * FLOPS
    assert spent.by_kind.get("kernels", 0.0) == 0.0
    floor = time_floor(program(), PeakRates.of(chip))
    assert chip.bf16_flops_per_device is not None
    assert floor.compute >= 6 * FLOPS / chip.bf16_flops_per_device
    assert spent.seconds > floor.seconds
