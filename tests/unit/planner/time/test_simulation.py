"""Timelines worked out by hand on a machine of round figures, and a real program against its analytic FLOPs."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import ChipModel, chip_model_of
from forerun.planner.time.execution import Spent
from forerun.planner.time.simulation import Simulation

SAMPLES = Path(__file__).parent / "samples"
MIB = 2**20
# A second for each MiB: through HBM 1, over both directions of a ring 2, to and from the host 4.
MACHINE = ChipModel(
    clock_hz=1e9,  # vector arithmetic takes no time
    matmul_flops=1.0,
    matmul_share=1.0,
    hbm_bytes_per_second=MIB,
    link_bytes_per_second=MIB,
    host_bytes_per_second=MIB / 4,
    matrix_unit=1,
    op_seconds=0.0,
    dma_seconds=0.0,
    hop_seconds=0.0,
    collective_seconds=0.0,
)
PART = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"  # one MiB
PART_VMEM = PART.replace("(2,1)}", "(2,1)S(1)}")
TWO = "bf16[2,4096,128]{2,1,0:T(8,128)(2,1)}"
HOST_PART = PART.replace("(2,1)}", "(2,1)S(5)}")
SYNC = "u32[]{:S(2)}"
PAIR = "replica_groups={{0,1}}"
WORK_OF_2 = f"{PART} negate(%a)"  # a MiB read and a MiB written: two seconds


def play(entry: str, others: str = "", machine: ChipModel = MACHINE) -> Spent:
    text = f"""HloModule m

{others}
ENTRY %main (a: {PART}, w: {TWO}) -> () {{
  %a = {PART} parameter(0)
  %w = {TWO} parameter(1)
{entry}
}}
"""
    return Simulation(parse(text), machine, "v5e").run()


def parts(spent: Spent) -> dict[str, Any]:
    assert sum(spent.by_kind.values()) == pytest.approx(spent.seconds), "every second is of some kind"
    return {kind: pytest.approx(seconds, abs=1e-4) for kind, seconds in spent.by_kind.items() if seconds > 1e-4}


GATHER = f"({PART}, {TWO}) all-gather-start(%a), {PAIR}, dimensions={{0}}"  # half of 2 MiB, both ways: 0.5 s


def test_core_in_order() -> None:
    spent = play(f"  %x = {WORK_OF_2}\n  %y = {PART} negate(%x)\n  %v = {PART_VMEM} negate(%x)")
    assert parts(spent) == {"memory": 5.0}


def test_matmul_is_bound_by_flops_or_bytes() -> None:
    line = "  %d = f32[8,128]{1,0:T(8,128)} dot(%a, %a), lhs_contracting_dims={0,1,2}, rhs_contracting_dims={0,1,2}"
    flops = 2 * 8 * 128 * 4096 * 128
    assert play(line).by_kind["matmul"] == flops
    assert play(line).flops["matmul"] == flops
    fast = replace(MACHINE, matmul_flops=flops * 1e3, matmul_share=0.5)
    assert play(line, machine=fast).by_kind["memory"] == pytest.approx(2 + 8 * 128 * 4 / MIB)


def test_hidden_behind_work() -> None:
    """0 to 0.5 on the wire, the core works 0 to 2."""
    spent = play(f"  %g = {GATHER}\n  %x = {WORK_OF_2}\n  %d = {TWO} all-gather-done(%g)")
    assert parts(spent) == {"memory": 2.0}
    assert spent.busy["ici"] == 0.5


def test_not_hidden() -> None:
    spent = play(f"  %g = {GATHER}\n  %d = {TWO} all-gather-done(%g)\n  %x = {WORK_OF_2}")
    assert parts(spent) == {"memory": 2.0, "collectives": 0.5}


def test_one_after_the_other_on_one_queue() -> None:
    """Five gathers queue until 2.5, the core has worked until 2."""
    starts = "\n".join(f"  %g{n} = {GATHER}" for n in range(5))
    dones = "\n".join(f"  %d{n} = {TWO} all-gather-done(%g{n})" for n in range(5))
    assert parts(play(f"{starts}\n  %x = {WORK_OF_2}\n{dones}")) == {"memory": 2.0, "collectives": 0.5}


def test_a_blocking_collective_waits_for_the_wire() -> None:
    """Started at 0, on the wire to 0.5; the blocking one takes the wire from 0.5 to 1."""
    spent = play(
        f"  %g = {GATHER}\n  %s = {TWO} all-gather(%a), {PAIR}, dimensions={{0}}\n  %d = {TWO} all-gather-done(%g)"
    )
    assert parts(spent) == {"collectives": 1.0}
    assert spent.busy["ici"] == 1.0


def test_queues_run_beside_each_other() -> None:
    """Wire to 0.5, DMA to 2, host to 4; the core shares HBM with the DMA until 2, ends at 3, and waits for the host."""
    spent = play(
        f"""  %g = {GATHER}
  %c = ({PART_VMEM}, {PART}, {SYNC}) copy-start(%a)
  %h = ({HOST_PART}, {PART}, {SYNC}) copy-start(%a)
  %x = {WORK_OF_2}
  %gd = {TWO} all-gather-done(%g)
  %cd = {PART_VMEM} copy-done(%c)
  %hd = {HOST_PART} copy-done(%h)"""
    )
    assert parts(spent) == {"memory": 3.0, "host": 1.0}
    assert {queue: pytest.approx(seconds, abs=1e-4) for queue, seconds in spent.busy.items()} == {
        "ici": 0.5,
        "dma": 1.0,
        "hbm": 3.0,
        "to host": 4.0,
    }


def permute(name: str, pairs: str) -> str:
    return f"  %{name} = ({PART}, {PART}, {SYNC}, {SYNC}) collective-permute-start(%a), source_target_pairs={pairs}"


def test_both_ways_round_the_ring_at_once() -> None:
    forth, back = "{{0,1},{1,2},{2,3},{3,0}}", "{{0,3},{1,0},{2,1},{3,2}}"
    dones = f"\n  %d = {PART} collective-permute-done(%p)\n  %e = {PART} collective-permute-done(%q)"
    assert parts(play(f"{permute('p', forth)}\n{permute('q', back)}{dones}")) == {"collectives": 1.0}
    assert parts(play(f"{permute('p', forth)}\n{permute('q', forth)}{dones}")) == {"collectives": 2.0}


ASYNC = 'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'
ASYNC_FUSIONS = f"""%begin (p: {PART}) -> ({PART}, {TWO}) {{
  %p = {PART} parameter(0)
  %g = {TWO} all-gather(%p), channel_id=4, {PAIR}, dimensions={{0}}, {ASYNC}
  ROOT %c = ({PART}, {TWO}, {SYNC}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%beside (p: {PART}, q: {PART}) -> ({PART}, {TWO}) {{
  %p = {PART} parameter(0)
  %q = {PART} parameter(1)
  %n = {PART} negate(%p)
  %g = {TWO} all-gather(%q), channel_id=4, {PAIR}, dimensions={{0}}, {ASYNC}
  ROOT %t = ({PART}, {TWO}) tuple(%n, %g)
}}

%end (p: {PART}, q: {TWO}) -> {TWO} {{
  %p = {PART} parameter(0)
  %q = {TWO} parameter(1)
  %g = {TWO} all-gather(%p), channel_id=4, {PAIR}, dimensions={{0}}, {ASYNC}
  ROOT %c = {TWO} custom-call(%p, %q, %g), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_asynchronous_collective_fusions_are_paired_by_channel() -> None:
    begin = f"  %s = ({PART}, {TWO}, {SYNC}) fusion(%a), kind=kCustom, calls=%begin\n"
    beside = f"  %f = ({PART}, {TWO}) fusion(%a, %a), kind=kOutput, calls=%beside\n"
    end = f"  %e = {TWO} fusion(%a, %w), kind=kCustom, calls=%end"
    assert parts(play(begin + beside + end, ASYNC_FUSIONS)) == {"memory": 2.0}
    assert parts(play(begin + end, ASYNC_FUSIONS)) == {"collectives": 0.5}


def test_an_all_reduce_of_which_each_keeps_a_slice_is_a_reduce_scatter() -> None:
    """2 MiB on 2 devices: an all-reduce is 2 MiB over both ways, a reduce-scatter half of that."""
    others = f"""%scatter.1 (p: {TWO}) -> {PART} {{
  %p = {TWO} parameter(0)
  %i = s32[] partition-id()
  %r = {TWO} all-reduce(%p), channel_id=1, {PAIR}, to_apply=%add
  ROOT %s = {PART} dynamic-slice(%r, %i, %i, %i), dynamic_slice_sizes={{1,4096,128}}
}}
"""
    assert parts(play(f"  %f = {PART} fusion(%w), kind=kCustom, calls=%scatter.1", others)) == {"collectives": 0.5}
    assert parts(play(f"  %r = {TWO} all-reduce(%w), {PAIR}, to_apply=%add")) == {"collectives": 1.0}


SPARSE = f"""%called (p: {PART}) -> {TWO} {{
  %p = {PART} parameter(0)
  ROOT %g = {TWO} all-gather(%p), channel_id=9, {PAIR}, dimensions={{0}}
}}, execution_thread="sparsecore"

%wrapped (p: {PART}) -> {TWO} {{
  %p = {PART} parameter(0)
  ROOT %c = {TWO} call(%p), to_apply=%called
}}, execution_thread="sparsecore"

%looked_up (p: {PART}) -> {PART} {{
  %p = {PART} parameter(0)
  ROOT %n = {PART} negate(%p)
}}, execution_thread="sparsecore"

%wrapped.2 (p: {PART}) -> {PART} {{
  %p = {PART} parameter(0)
  ROOT %c = {PART} call(%p), to_apply=%looked_up
}}, execution_thread="sparsecore"
"""


def test_collectives_on_the_sparse_core() -> None:
    start = f'  %s = (({PART}), {TWO}) async-start(%a), async_execution_thread="sparsecore", calls=%wrapped\n'
    done = f"  %d = {TWO} async-done(%s)\n"
    assert parts(play(start + done, SPARSE)) == {"collectives": 0.5}
    assert parts(play(f"{start}  %x = {WORK_OF_2}\n{done}", SPARSE)) == {"memory": 2.0}


def test_work_that_begins_with_the_update() -> None:
    """Newer compilers prepare with an empty start; the operand comes with the update, at 2 s."""
    start = '  %s = ((), (), (s32[1]{0:S(2)})) async-start(), async_execution_thread="sparsecore", calls=%wrapped\n'
    update = f"  %u = (({PART}), {TWO}) async-update(%s, %a)\n  %d = {TWO} async-done(%u)\n"
    assert parts(play(f"{start}  %x = {WORK_OF_2}\n{update}", SPARSE)) == {"memory": 2.0, "collectives": 0.5}


def test_other_work_on_the_sparse_core() -> None:
    start = f'  %s = (({PART}), {PART}) async-start(%a), async_execution_thread="sparsecore", calls=%wrapped.2\n'
    spent = play(f"{start}  %x = {PART_VMEM} negate(%a)\n  %d = {PART} async-done(%s)", SPARSE)
    assert spent.seconds == pytest.approx(2.0)
    assert spent.busy["sparse core"] == pytest.approx(2.0)


LOOP = """%condition (p: (s32[], CARRIED)) -> pred[] {
  %p = (s32[]{:T(128)}, CARRIED) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} constant(10)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (p: (s32[], CARRIED)) -> (s32[], CARRIED) {
  %p = (s32[]{:T(128)}, CARRIED) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %a = CARRIED get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
TURN
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, CARRIED) tuple(%next, %a)
}
"""
RUN = f"""  %zero = s32[]{{:T(128)}} constant(0)
  %carry = (s32[]{{:T(128)}}, {PART}) tuple(%zero, %a)
  %loop = (s32[]{{:T(128)}}, {PART}) while(%carry), condition=%condition, body=%body"""


def looped(turn: str) -> Spent:
    return play(RUN, LOOP.replace("CARRIED", PART).replace("TURN", turn))


def test_a_loop_is_its_body_so_many_times() -> None:
    spent = looped(f"  %x = {WORK_OF_2}\n  %g = {GATHER}\n  %d = {TWO} all-gather-done(%g)")
    assert parts(spent) == {"memory": 20.0, "collectives": 5.0}


def test_a_queue_that_never_rests_sets_the_pace() -> None:
    """2 s of work a turn, 4 s to the host, awaited only after the next turn: 10 x 4 s, said to be the host's."""
    spent = looped(f"  %x = {WORK_OF_2}\n  %h = ({HOST_PART}, {PART}, {SYNC}) copy-start(%a)")
    assert parts(spent) == {"memory": 20.0, "host": 20.0}


def test_the_slower_branch_is_taken() -> None:
    others = f"""%short (a: {PART}) -> {PART} {{
  ROOT %a = {PART} parameter(0)
}}

%long (a: {PART}) -> {PART} {{
  %a = {PART} parameter(0)
  ROOT %x = {WORK_OF_2}
}}
"""
    line = f"  %c = {PART} conditional(%i, %a, %a), branch_computations={{%short, %long}}"
    assert parts(play(line, others)) == {"memory": 2.0}
    line = f"  %c = {PART} conditional(%i, %a, %a), true_computation=%short, false_computation=%long"
    assert parts(play(line, others)) == {"memory": 2.0}
    assert parts(play(f"  %c = {PART} call(%a), to_apply=%long", others)) == {"memory": 2.0}


def test_what_costs_nothing_and_what_does() -> None:
    free = "AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone"
    for target in free:
        assert play(f'  %c = {TWO} custom-call(), custom_call_target="{target}"').seconds == 0
    assert play(f"  %b = {PART} bitcast(%a)\n  %t = ({PART}, {PART}) tuple(%a, %b)").seconds == 0
    spent = play(f'  %c = {PART} custom-call(%a), custom_call_target="SomethingNew"')
    assert parts(spent) == {"memory": 2.0}, "an unknown one reads and writes"
    spent = play(f'  %my_kernel = {PART} custom-call(%a), custom_call_target="tpu_custom_call"')
    assert parts(spent) == {"kernels": 2.0}
    spent = play("  %z = f32[]{:T(128)} constant(0)\n  %r = f32[]{:T(128)} reduce(%a, %z), to_apply=%add")
    assert spent.seconds == pytest.approx(1.0, abs=1e-3), "a sum is one number, but reads everything"
    assert play("  %i = s32[]{:T(128)} constant(3)\n  %j = s32[]{:T(128)} add(%i, %i)").seconds == 0


def matmul_flops_of_qwen3_06b(tokens: int) -> int:
    """Full remat: 28 layers forward twice (the last projection once, nobody needs its output), backward twice that."""
    embed, heads, kv_heads, head, mlp, vocab, layers = 1024, 16, 8, 128, 3072, 151_936, 28
    attention = embed * head * (heads + 2 * kv_heads) + heads * head * embed
    down = mlp * embed
    layer = attention + 2 * embed * mlp + down
    return 2 * tokens * (layers * (4 * layer - down) + 3 * vocab * embed)


def counted(function: Callable[[], Spent]) -> tuple[Spent, int]:
    """With the number of calls that it takes, in Python: the same on every machine."""
    calls = 0

    def heard(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        return function(), calls
    finally:
        sys.setprofile(before)


def test_a_real_program_does_the_work_of_its_model() -> None:
    """Qwen3-0.6B on 4 chips of tpu7x: windowed matmuls, sparse-core collectives, three levels of loops."""
    text = lzma.decompress((SAMPLES / "qwen3_06b_tpu7x.txt.xz").read_bytes()).decode()
    chip = chip_named("tpu7x")
    spent, calls = counted(lambda: Simulation(parse(text), chip_model_of(chip), chip.name).run())
    instructions = sum(len(one.instructions) for one in parse(text).computations.values())
    assert calls < 80 * instructions, "26, in a fraction of a second; played turn by turn, loops would take hundreds"
    assert spent.flops["matmul"] == pytest.approx(matmul_flops_of_qwen3_06b(4 * 1024), rel=1e-3)
    assert sum(spent.by_kind.values()) == pytest.approx(spent.seconds)
    parameters, devices, bf16 = 28 * 15_728_640, 8, 2
    once = parameters * bf16 * (devices - 1) / devices  # every weight of the layers to every device
    fastest = 3 * once / (2 * chip_model_of(chip).link_bytes_per_second)  # forward, backward, and gradients back
    assert fastest <= spent.busy["ici"] <= 2.5 * fastest, "the embedding, and latencies, come on top"


@pytest.mark.parametrize(("start", "calls"), [("async-start", "calls"), ("call-start", "to_apply")])
def test_a_collective_on_a_sparse_core_leaves_the_core_free(start: str, calls: str) -> None:
    """One MiB comes in over both directions of a ring in half a second, during two seconds of work."""
    inside = f"""%gather (p: {PART}) -> {TWO} {{
  %p = {PART} parameter(0)
  ROOT %g = {TWO} all-gather(%p), channel_id=1, {PAIR}, dimensions={{0}}
}}, execution_thread="sparsecore"
"""
    spent = play(
        f"""  %start = (({PART}), {TWO}, {SYNC}) {start}(%a), async_execution_thread="sparsecore", {calls}=%gather
  %work = {WORK_OF_2}
  ROOT %done = {TWO} {start.replace("-start", "-done")}(%start)""",
        inside,
    )
    assert parts(spent) == {"memory": 2.0}
    assert spent.busy["sparse core"] == pytest.approx(spent.busy["ici"]) == pytest.approx(0.5, abs=1e-3)
