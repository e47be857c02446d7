"""Copies and the core share the bandwidth of HBM: seconds by hand. A MiB takes one second on this machine."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.execution import Spent
from forerun.planner.time.simulation import Simulation

MIB = 1 << 20
MACHINE = ChipModel(1e9, 1.0, 1.0, MIB, MIB, MIB, matrix_unit=1, op_seconds=0.0, dma_seconds=0.0)
PART = "bf16[4096,128]{1,0:T(8,128)(2,1)}"  # one MiB
NEAR = "bf16[4096,128]{1,0:T(8,128)(2,1)S(1)}"
FLAG = "u32[]{:S(2)}"
START, DONE = f"({NEAR}, {PART}, {FLAG}) copy-start(%a)", f"{NEAR} copy-done"
READ = f"{NEAR} negate(%a)"  # one second of HBM
SMALL = "bf16[1,2]{1,0:T(8,128)(2,1)S(1)}"
SQUARE = "bf16[2,2]{1,0:T(8,128)(2,1)S(1)}"
COMPUTE = f"{SQUARE} dot(%s, %s), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"  # nothing in HBM


def play(lines: str, others: str = "") -> Spent:
    text = f"""HloModule m

{others}
ENTRY %main (a: {PART}, s: {SMALL}) -> () {{
  %a = {PART} parameter(0)
  %s = {SMALL} parameter(1)
{lines}
  ROOT %t = () tuple()
}}
"""
    return Simulation(parse(text), MACHINE, "v5e").run()


def test_a_copy_and_a_read_take_the_sum_of_their_bytes() -> None:
    spent = play(f"  %c = {START}\n  %x = {READ}\n  %d = {DONE}(%c)")
    assert spent.seconds == pytest.approx(2.0)
    assert spent.busy["hbm"] == pytest.approx(2.0)


def test_copies_that_were_not_shared_come_after_the_read() -> None:
    """Two copies and a read: the read shares with the first one until 2, the second one ends at 3."""
    spent = play(f"  %c = {START}\n  %e = {START}\n  %x = {READ}\n  %d = {DONE}(%c)\n  %f = {DONE}(%e)")
    assert spent.by_kind == pytest.approx({"memory": 2.0, "dma": 1.0})


def test_a_copy_uses_the_bandwidth_that_a_computation_leaves() -> None:
    """8 FLOPs, so 8 seconds, which hide the copy."""
    spent = play(f"  %c = {START}\n  %x = {COMPUTE}\n  %d = {DONE}(%c)")
    assert spent.seconds == pytest.approx(8.0)


def test_a_loop_is_no_faster_than_its_bytes() -> None:
    """Each of 5 iterations reads one MiB and starts a copy of another one that it does not await."""
    state = f"(s32[], {PART})"
    loop = f"""%condition (p: {state}) -> pred[] {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = {PART} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = {READ}
  %c = {START}
  ROOT %t = {state} tuple(%next, %a)
}}
"""
    lines = f"""  %zero = s32[] constant(0)
  %carry = {state} tuple(%zero, %a)
  %loop = {state} while(%carry), condition=%condition, body=%body"""
    assert play(lines, loop).seconds == pytest.approx(10.0)
    assert play(f"  %c = {START}\n{lines}\n  %d = {DONE}(%c)", loop).seconds == pytest.approx(11.0)
