"""Multiply-adds counted one by one on small shapes; bytes added up by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.simulation import Simulation


def module_of(entry: str, others: str = "") -> Module:
    return parse(f"HloModule m\n\n{others}\nENTRY %main () -> () {{\n{entry}\n}}\n")


def flops(entry: str, name: str = "y", others: str = "") -> float:
    module = module_of(entry, others)
    main = module.computations["main"]
    return InstructionWork(module).flops(main, main.by_name[name])


def hbm_bytes(entry: str, name: str = "y", others: str = "") -> float:
    module = module_of(entry, others)
    main = module.computations["main"]
    return InstructionWork(module).hbm_bytes(main, main.by_name[name])


def counted(
    batch: int,
    inputs: int,
    outputs: int,
    lengths: Sequence[int],
    results: Sequence[int],
    *,
    size: Sequence[int],
    stride: Sequence[int],
    before: Sequence[int],
    spread: Sequence[int],
    reach: Sequence[int],
) -> int:
    """Two for each product of an input element and a weight that a convolution adds to an output."""
    total = 0
    for place in itertools.product(*map(range, results)):
        for tap in itertools.product(*map(range, size)):
            where = [p * s + t * r - b for p, s, t, r, b in zip(place, stride, tap, reach, before, strict=True)]
            inside = all(w % gap == 0 and 0 <= w // gap < n for w, gap, n in zip(where, spread, lengths, strict=True))
            total += inside
    return 2 * total * batch * inputs * outputs


def test_dot() -> None:
    entry = """  %a = f32[3,4,5]{2,1,0} parameter(0)
  %b = f32[3,5,7]{2,1,0} parameter(1)
  %y = f32[3,4,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"""  # noqa: E501
    assert flops(entry) == sum(2 for _ in itertools.product(range(3), range(4), range(7), range(5)))


def test_dot_over_two_dimensions() -> None:
    entry = """  %a = f32[6,4,5]{2,1,0} parameter(0)
  %b = f32[4,5,7]{2,1,0} parameter(1)
  %y = f32[6,7]{1,0} dot(%a, %b), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}"""
    assert flops(entry) == 2 * 6 * 7 * 20


def test_matmul_as_the_compiler_writes_it() -> None:
    """BSE,EF->BSF and BCV,BCE->VE."""
    entry = """  %a = bf16[3,16,8]{2,1,0} parameter(0)
  %b = bf16[8,24,1]{1,0,2} parameter(1)
  %y = bf16[3,16,24]{2,1,0} convolution(%a, %b), window={size=1}, dim_labels=0bf_io0->0bf"""
    assert flops(entry) == 2 * 3 * 16 * 8 * 24
    entry = """  %a = bf16[3,16,40]{2,1,0} parameter(0)
  %b = bf16[3,16,24]{2,1,0} parameter(1)
  %y = f32[40,24,1]{1,0,2} convolution(%a, %b), window={size=3}, dim_labels=0fb_0io->bf0"""
    assert flops(entry) == 2 * 3 * 16 * 40 * 24


def test_heads_in_the_window() -> None:
    """BSE,EHD->BSHD: 5 heads lie in a window of which padding leaves one tap for each."""
    entry = """  %a = bf16[3,16,8,1]{2,1,0,3} parameter(0)
  %b = bf16[8,5,4,1]{2,1,0,3} parameter(1)
  %y = bf16[3,16,5,4]{3,1,2,0} convolution(%a, %b), window={size=1x5 pad=0_0x4_4 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f"""  # noqa: E501
    assert flops(entry) == 2 * 3 * 16 * 8 * 5 * 4


def test_batched_matmul_in_the_window() -> None:
    """BHQD,BHKD->BHQK with 6 heads: strides and holes leave the products of equal heads."""
    entry = """  %a = bf16[6,16,8]{2,1,0} parameter(0)
  %b = bf16[6,24,8]{2,1,0} parameter(1)
  %y = bf16[6,16,24]{2,1,0} convolution(%a, %b), window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0oi->0bf"""
    assert flops(entry) == 2 * 6 * 16 * 24 * 8


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pad", [(0, 0), (2, 1), (-1, 0)])
@pytest.mark.parametrize(("spread", "reach"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_convolution_against_every_product(stride: int, pad: tuple[int, int], spread: int, reach: int) -> None:
    lengths, size = (7, 6), (3, 2)
    extent = [(n - 1) * spread + 1 + sum(pad) for n in lengths]
    results = [(e - ((k - 1) * reach + 1)) // stride + 1 for e, k in zip(extent, size, strict=True)]
    window = (
        f"size=3x2 stride={stride}x{stride} pad={pad[0]}_{pad[1]}x{pad[0]}_{pad[1]} "
        f"lhs_dilate={spread}x{spread} rhs_dilate={reach}x{reach}"
    )
    entry = f"""  %a = f32[2,7,6,3]{{3,2,1,0}} parameter(0)
  %b = f32[3,2,3,7]{{3,2,1,0}} parameter(1)
  %y = f32[2,{results[0]},{results[1]},7]{{3,2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels=b01f_01io->b01f"""  # noqa: E501
    expected = counted(
        2,
        3,
        7,
        lengths,
        results,
        size=size,
        stride=(stride,) * 2,
        before=(pad[0],) * 2,
        spread=(spread,) * 2,
        reach=(reach,) * 2,
    )
    assert flops(entry) == expected


def test_groups() -> None:
    """Eight features in four groups of two; and a batch of eight in four groups."""
    entry = """  %a = f32[2,5,8]{2,1,0} parameter(0)
  %b = f32[1,2,12]{2,1,0} parameter(1)
  %y = f32[2,5,12]{2,1,0} convolution(%a, %b), window={size=1}, dim_labels=b0f_0io->b0f, feature_group_count=4"""
    assert flops(entry) == 2 * (2 * 5 * 12) * 2
    entry = """  %a = f32[8,5,3]{2,1,0} parameter(0)
  %b = f32[1,3,12]{2,1,0} parameter(1)
  %y = f32[2,5,12]{2,1,0} convolution(%a, %b), window={size=1}, dim_labels=b0f_0io->b0f, batch_group_count=4"""
    assert flops(entry) == 2 * (2 * 5 * 12) * 3


NESTED = """%inner (p: f32[4,5], q: f32[5,7]) -> f32[4,7] {
  %p = f32[4,5]{1,0} parameter(0)
  %q = f32[5,7]{1,0} parameter(1)
  ROOT %d = f32[4,7]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (p: f32[4,5], q: f32[5,7]) -> f32[4,7] {
  %p = f32[4,5]{1,0} parameter(0)
  %q = f32[5,7]{1,0} parameter(1)
  %one = f32[4,7]{1,0} fusion(%p, %q), kind=kOutput, calls=%inner
  %two = f32[4,7]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[4,7]{1,0} add(%one, %two)
}
"""
ENTRY_NESTED = """  %p = f32[4,5]{1,0} parameter(0)
  %q = f32[5,7]{1,0} parameter(1)
  %y = f32[4,7]{1,0} fusion(%p, %q), kind=kOutput, calls=%outer"""


def test_fusions_in_fusions() -> None:
    assert flops(ENTRY_NESTED, others=NESTED) == 2 * (2 * 4 * 5 * 7)
    assert hbm_bytes(ENTRY_NESTED, others=NESTED) == 4 * (4 * 5 + 5 * 7 + 4 * 7)


STACK = "bf16[32,8,128]{2,1,0:T(8,128)(2,1)}"
LAYER = "bf16[1,8,128]{2,1,0:T(8,128)(2,1)}"
LAYER_BYTES = 8 * 128 * 2
VMEM_LAYER = LAYER.replace("(2,1)}", "(2,1)S(1)}")
SLICED = f"""%sliced (w: {STACK}, i: s32[]) -> {LAYER} {{
  %w = {STACK} parameter(0)
  %i = s32[]{{:T(128)S(6)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %view = {STACK} bitcast(%w)
  ROOT %s = {LAYER} dynamic-slice(%view, %i, %zero, %zero), dynamic_slice_sizes={{1,8,128}}
}}

%updated (w: {STACK}, u: {LAYER}, i: s32[]) -> ({LAYER}, {STACK}) {{
  %w = {STACK} parameter(0)
  %u = {LAYER} parameter(1)
  %i = s32[]{{:T(128)S(6)}} parameter(2)
  %zero = s32[]{{:T(128)}} constant(0)
  %n = {LAYER} negate(%u)
  %d = {STACK} dynamic-update-slice(%w, %n, %i, %zero, %zero)
  ROOT %both = ({LAYER}, {STACK}) tuple(%n, %d)
}}
"""
INPUTS = f"""  %w = {STACK} parameter(0)
  %u = {LAYER} parameter(1)
  %v = {VMEM_LAYER} parameter(2)
  %i = s32[]{{:T(128)S(6)}} parameter(3)
"""


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        (f"{LAYER} fusion(%w, %i), kind=kLoop, calls=%sliced", 2),  # one layer read, one written
        (f"{VMEM_LAYER} fusion(%w, %i), kind=kLoop, calls=%sliced", 1),  # written to VMEM
        (f"({LAYER}, {STACK}) fusion(%w, %u, %i), kind=kLoop, calls=%updated", 3),  # read once, written to two places
        (f"({LAYER}, {STACK}) fusion(%w, %v, %i), kind=kLoop, calls=%updated", 2),  # read from VMEM
        (f"{LAYER} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={{1,8,128}}", 2),
        (f"{VMEM_LAYER} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={{1,8,128}}", 1),
        (f"{LAYER} slice(%v), slice={{[0:1], [0:8], [0:128]}}", 1),
        (f"{STACK} dynamic-update-slice(%w, %u, %i, %i, %i)", 2),
        (f"{STACK} dynamic-update-slice(%w, %v, %i, %i, %i)", 1),
        (f"{LAYER} copy(%u)", 2),
        (f"{VMEM_LAYER} copy(%u)", 1),
        (f"{VMEM_LAYER} add(%v, %v)", 0),
        (f"{STACK} copy(%w)", 64),
    ],
)
def test_bytes_through_hbm(line: str, layers: int) -> None:
    assert hbm_bytes(f"{INPUTS}  %y = {line}", others=SLICED) == layers * LAYER_BYTES


def test_a_collective_beside_a_matmul_is_not_its_traffic() -> None:
    whole = "bf16[256,128]{1,0:T(8,128)(2,1)}"
    part = "bf16[32,128]{1,0:T(8,128)(2,1)}"
    others = f"""%beside (a: {LAYER}, s: {part}) -> ({LAYER}, {whole}) {{
  %a = {LAYER} parameter(0)
  %s = {part} parameter(1)
  %n = {LAYER} negate(%a)
  %g = {whole} all-gather(%s), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
  ROOT %t = ({LAYER}, {whole}) tuple(%n, %g)
}}
"""
    entry = f"""{INPUTS}  %s = {part} parameter(4)
  %y = ({LAYER}, {whole}) fusion(%u, %s), kind=kLoop, calls=%beside"""
    assert hbm_bytes(entry, others=others) == 2 * LAYER_BYTES


def test_rows_of_a_table() -> None:
    """An embedding of 1,000 rows of which 16 are gathered."""
    others = """%looked_up (t: f32[1000,128], n: s32[16]) -> f32[16,128] {
  %t = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %n = s32[16]{0:T(1024)} parameter(1)
  ROOT %g = f32[16,128]{1,0:T(8,128)} gather(%t, %n), offset_dims={1}
}
"""
    entry = """  %t = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %n = s32[16]{0:T(1024)} parameter(1)
  %y = f32[16,128]{1,0:T(8,128)} fusion(%t, %n), kind=kLoop, calls=%looked_up"""
    assert hbm_bytes(entry, others=others) == 16 * 128 * 4 * 2 + 1024 * 4


def test_a_slice_of_a_padded_array_reads_only_its_part() -> None:
    """A windowed matmul reads [8, 128] of each half of [16, 2 x 128]: the padding and the other rows are not read."""
    fused = """%fused (p: f32[16,128], i: s32[]) -> f32[8,256] {
  %p = f32[16,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %c = f32[] constant(0)
  %wide = f32[16,256]{1,0} pad(%p, %c), padding=0_0x0_128
  %half = bf16[16,256]{1,0} convert(%wide)
  %part = bf16[8,256]{1,0} dynamic-slice(%half, %i, %z), dynamic_slice_sizes={8,256}
  ROOT %n = f32[8,256]{1,0} convert(%part)
}
"""
    module = module_of(
        """  %a = f32[16,128]{1,0} parameter(0)
  %i = s32[] constant(0)
  %y = f32[8,256]{1,0:S(1)} fusion(%a, %i), kind=kLoop, calls=%fused""",
        fused,
    )
    main = module.computations["main"]
    index = 4
    assert InstructionWork(module, 128).hbm_bytes(main, main.by_name["y"]) == 8 * 128 * 4 + index
    assert InstructionWork(module).hbm_bytes(main, main.by_name["y"]) == 16 * 128 * 4 + index, "GPUs: not changed"


# Vector arithmetic: operations by hand, and cycles as counted in dumped code.

NEAR = "f32[4096,2048]{1,0:T(8,128)S(1)}"  # 8,192 registers of 1,024 elements, in on-chip memory
SUM = "f32[4096]{0:T(1024)S(1)}"
REGISTERS = 8192


def module_with(lines: str, result: str = NEAR) -> str:
    return f"""HloModule m

%fused (p: {NEAR}) -> {result} {{
  %p = {NEAR} parameter(0)
  %z = f32[] constant(0)
{lines}
}}

ENTRY %main (a: {NEAR}) -> {result} {{
  %a = {NEAR} parameter(0)
  ROOT %x = {result} fusion(%a), kind=kLoop, calls=%fused
}}
"""


# Fusions, their operations per element, and the cycles that v5e's code has for them (None: no such fusion was dumped).
CASES = [
    ("\n".join(f"  %e{n + 1} = {NEAR} exponential(%{'p' if n == 0 else f'e{n}'})" for n in range(4)), 16, 33760),
    (f"  %q = {NEAR} divide(%p, %p)\n  %r = {NEAR} add(%q, %p)\n  %s = {NEAR} divide(%r, %p)", 29, 63823),
    (f"  %q = {NEAR} sqrt(%p)", 14, 32363),
    (f"  %q = {NEAR} multiply(%p, %p)", 1, None),
    # The exponential and three other operations are computed in the same cycles.
    (f"  %q = {NEAR} subtract(%p, %p)\n  %r = {NEAR} exponential(%q)\n  %s = {NEAR} add(%r, %p)", 4, None),
]


@pytest.mark.parametrize(("lines", "operations", "cycles"), CASES)
def test_operations_of_fusions(lines: str, operations: int, cycles: int | None) -> None:
    head, _, last = lines.rpartition("\n")
    module = parse(module_with((head + "\n" if head else "") + "  ROOT " + last.strip()))
    main = module.computations["main"]
    machine = chip_model_of(chip_named("v5e"))
    work = InstructionWork(module, machine.matrix_unit, machine.division_ops)
    assert work.vector_work(main, main.root).operations == operations * REGISTERS * 1024
    seconds = Simulation(module, machine, "v5e").run().seconds - machine.op_seconds
    assert seconds * machine.clock_hz == pytest.approx(operations * REGISTERS / 4)
    if cycles:
        assert seconds * machine.clock_hz == pytest.approx(cycles, rel=0.15)


def test_a_reduction_reads_its_operand() -> None:
    module = parse(module_with(f"  ROOT %s = {SUM} reduce(%p, %z), dimensions={{1}}, to_apply=%add", SUM))
    main = module.computations["main"]
    assert InstructionWork(module).vector_work(main, main.root).operations == REGISTERS * 1024


def test_two_cores_have_twice_the_rate() -> None:
    one, two = chip_model_of(chip_named("v5e")), chip_model_of(chip_named("v5p"))
    assert two.vector_ops_per_second / two.clock_hz == 2 * one.vector_ops_per_second / one.clock_hz == 2 * 4096
