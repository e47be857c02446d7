"""Matrix multiplications: their dimensions, and the padding to the matrix unit, by hand."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.matrix_work import GroupedShape, MatrixProduct, grouped_shape
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation


@pytest.mark.parametrize(
    ("product", "unit", "rows", "tiles"),
    [
        (MatrixProduct(1, 4096, 4096, 2048), 128, 4096, 32 * 16),  # no padding
        (MatrixProduct(16, 512, 2048, 64), 128, 512, 16 * 16),  # scores of a head of 64: half of each tile is empty
        (MatrixProduct(16, 512, 2048, 128), 128, 512, 16 * 16),  # so a head of 128 takes as long
        (MatrixProduct(16, 512, 2048, 128), 256, 512, 16 * 8),  # and half of a larger unit is empty
        (MatrixProduct(16, 512, 64, 2048), 128, 64, 16 * 4 * 16),  # held: the probabilities; rows: the head
        (MatrixProduct(1, 8, 2048, 2048), 128, 64, 16 * 16),  # few rows: loading the tiles takes half of 128 rows
        (MatrixProduct(1, 32, 512, 512, passes=6), 128, 6 * 64, 4 * 4),
    ],
)
def test_rows_of_the_matrix_unit(product: MatrixProduct, unit: int, rows: int, tiles: int) -> None:
    assert product.unit_flops(unit) == 2 * unit * unit * rows * tiles


def test_padding_never_lowers_the_work() -> None:
    for m, n, k in ((1, 1, 1), (7, 300, 129), (512, 64, 64), (129, 8, 4096)):
        product = MatrixProduct(3, m, n, k)
        assert product.unit_flops(256) >= product.flops == 2 * 3 * m * n * k


BATCHED = "window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0oi->0bf"
CASES = {
    # Scores of 16 heads: the heads are a window of which each output sees one position.
    f"f32[16,512,2048] convolution(%p, %q), {BATCHED}": ("bf16[16,512,64]", "bf16[16,2048,64]", (16, 512, 2048, 64)),
    # A projection: 8 heads of 64 are contracted together.
    "bf16[1024,1,512] convolution(%p, %q), window={size=8}, dim_labels=b0f_0io->b0f": (
        "bf16[1024,8,64]",
        "bf16[8,64,512]",
        (1, 1024, 512, 512),
    ),
    # Its opposite: 512 inputs become 8 heads of 64, written as a window that slides over padding.
    "bf16[1024,8,64] convolution(%p, %q), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0io->b0f": (
        "bf16[1024,1,512]",
        "bf16[8,512,64]",
        (1, 1024, 512, 512),
    ),
    "bf16[4,128,64] dot(%p, %q), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
    "rhs_contracting_dims={1}": ("bf16[4,128,32]", "bf16[4,32,64]", (4, 128, 64, 32)),
}


@pytest.mark.parametrize(("line", "case"), CASES.items())
def test_dimensions_of_instructions(line: str, case: tuple[str, str, tuple[int, int, int, int]]) -> None:
    left, right, (batch, m, n, k) = case
    text = f"""HloModule m

ENTRY %main (p: {left}, q: {right}) -> f32[1] {{
  %p = {left} parameter(0)
  %q = {right} parameter(1)
  ROOT %x = {line}
}}
"""
    module = parse(text)
    main = module.computations["main"]
    work = InstructionWork(module, 128)
    assert work.flops(main, main.root) == 2 * batch * m * n * k
    assert work.unit_flops(main, main.root) == MatrixProduct(batch, m, n, k).unit_flops(128)


def test_eight_bit_operands_are_faster() -> None:
    text = """HloModule m

ENTRY %main (p: s8[2048,2048], q: s8[2048,2048]) -> s32[2048,2048] {
  %p = s8[2048,2048]{1,0:T(8,128)(4,1)S(1)} parameter(0)
  %q = s8[2048,2048]{1,0:T(8,128)(4,1)S(1)} parameter(1)
  ROOT %x = s32[2048,2048]{1,0:T(8,128)S(1)} convolution(%p, %q), dim_labels=bf_io->bf
}
"""
    flops = 2 * 2048**3
    for module, speed in (
        (parse(text), 393 / 197),
        (parse(text.replace("q: s8", "q: bf16").replace("%q = s8", "%q = bf16")), 1),
    ):
        chip = chip_named("v5e")
        assert time_floor(module, PeakRates.of(chip)).compute == pytest.approx(flops / 197e12 / speed, rel=0.01)
        machine = chip_model_of(chip)
        seconds = Simulation(module, machine, "v5e").run().by_kind["matmul"] - machine.op_seconds
        assert seconds == pytest.approx(flops / (197e12 * machine.matmul_share) / speed, rel=0.01)


# The kernels of experts in a program that libtpu compiled for v5e: two grouped products, forward and backward.

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
