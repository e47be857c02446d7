"""Vector arithmetic: operations by hand, and cycles as counted in dumped code."""

from __future__ import annotations

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import assumed
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.simulation import Simulation

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
    machine = assumed(chip_named("v5e"))
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
    one, two = assumed(chip_named("v5e")), assumed(chip_named("v5p"))
    assert two.vector_ops_per_second / two.clock_hz == 2 * one.vector_ops_per_second / one.clock_hz == 2 * 4096
