"""Timelines worked out by hand on a GPU of round figures, and a real program against its analytic FLOPs."""

from __future__ import annotations

import lzma
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.execution import Spent
from forerun.planner.time.gpu.gpu_model import GpuModel
from forerun.planner.time.gpu.gpu_simulation import GpuSimulation
from forerun.planner.time.prediction import GPU_VALIDATION, GUESSED_LOOP, UNKNOWN_CHIP, UNKNOWN_KERNEL, gpu_step_time
from forerun.planner.time.roofline import PeakRates, time_floor

SAMPLE = Path(__file__).parents[1] / "samples" / "qwen3_06b_h100.txt.xz"
MIB = 2**20
# A second for each MiB: through HBM 1, over the links 1, over the network 2, from and to the host 4.
MODEL = GpuModel(
    gemm_flops=1.0,
    fp8_flops=1.0,
    fp32_flops=1.0,
    attention_flops=1.0,
    attention_backward_flops=1.0,
    hbm_bytes_per_second=MIB,
    l2_bytes=0.0,
    l2_bytes_per_second=MIB,
    cores=1,
    tile=(128, 256),
    link_bytes_per_second=MIB,
    nvls_bytes_per_second=0.0,
    network_bytes_per_second=MIB / 2,
    host_bytes_per_second=MIB / 4,
    devices_per_host=2,
    kernel_seconds=0.0,
    loop_seconds=0.0,
    collective_seconds=0.0,
    bulk_collective_seconds=0.0,
    latency_protocol_share=1.0,
    node_seconds=0.0,
    copy_seconds=0.0,
    slowdown=0.0,
)
PART = "bf16[1,4096,128]{2,1,0}"  # one MiB
TWO = "bf16[2,4096,128]{2,1,0}"
HOST_PART = "bf16[1,4096,128]{2,1,0:S(5)}"
WORK_OF_2 = f"{PART} negate(%a)"  # a MiB read and a MiB written: two seconds
WITHIN, ACROSS = "replica_groups={{0,1}}", "replica_groups={{0,2}}"
GATHER = f"({PART}, {TWO}) all-gather-start(%a), {WITHIN}, dimensions={{0}}"  # sends one MiB: one second


def play(entry: str, others: str = "", model: GpuModel = MODEL) -> Spent:
    return GpuSimulation(program(entry, others), model).run()


def program(entry: str, others: str = "") -> Module:
    return parse(f"""HloModule m

{others}
ENTRY %main (a: {PART}, h: {HOST_PART}) -> () {{
  %a = {PART} parameter(0)
  %h = {HOST_PART} parameter(1)
{entry}
}}
""")


def parts(spent: Spent) -> dict[str, Any]:
    assert sum(spent.by_kind.values()) == pytest.approx(spent.seconds), "every second is of some kind"
    return {kind: pytest.approx(seconds) for kind, seconds in spent.by_kind.items() if seconds > 1e-9}


def test_kernels_run_in_order() -> None:
    lines = f"  %x = {WORK_OF_2}\n  %y = {PART} negate(%x)"
    assert parts(play(lines)) == {"memory": 4.0}
    assert parts(play(lines, model=replace(MODEL, kernel_seconds=0.25))) == {"memory": 4.5}
    cached = replace(MODEL, l2_bytes=8 * MIB, l2_bytes_per_second=2 * MIB)
    assert parts(play(lines, model=cached)) == {"memory": 2.0}


def test_a_collective_is_hidden_behind_kernels() -> None:
    assert parts(play(f"  %g = {GATHER}\n  %x = {WORK_OF_2}\n  %d = {TWO} all-gather-done(%g)")) == {"memory": 2.0}


def test_the_rest_of_a_collective_is_waited_for() -> None:
    """Two gathers take two seconds on the links. The first kernel starts after the first gather."""
    lines = f"  %g = {GATHER}\n  %k = {GATHER}\n  %e = {TWO} all-gather-done(%g)\n  %d = {TWO} all-gather-done(%k)"
    assert parts(play(lines)) == {"collectives": 2.0}
    spent = play(lines)
    assert spent.busy["links"] == pytest.approx(2.0)


def test_collectives_of_links_and_network_share_a_stream() -> None:
    far = GATHER.replace(WITHIN, ACROSS)  # two seconds on the network
    lines = f"  %g = {GATHER}\n  %k = {far}\n  %d = {TWO} all-gather-done(%k)\n  %e = {TWO} all-gather-done(%g)"
    assert parts(play(lines)) == {"network": 3.0}


def test_asynchronous_reduce_scatter_and_synchronous_collectives() -> None:
    inner = f"""%wrapped (p: {TWO}) -> {PART} {{
  %p = {TWO} parameter(0)
  ROOT %r = {PART} reduce-scatter(%p), {WITHIN}, dimensions={{0}}, to_apply=%add
}}
"""
    start = f"  %two = {TWO} broadcast(%a)\n  %s = (({TWO}), {PART}) async-start(%two), calls=%wrapped\n"
    spent = play(start + f"  %d = {PART} async-done(%s)", inner)
    assert spent.by_kind["collectives"] == pytest.approx(1.0)
    assert parts(play(f"  %r = {PART} all-reduce(%a), {WITHIN}")) == {"collectives": 1.0}
    sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    lines = f"  %g = {GATHER}{sync}\n  %x = {WORK_OF_2}\n  %d = {TWO} all-gather-done(%g)"
    assert parts(play(lines)) == {"collectives": 1.0, "memory": 2.0}


def test_kernels_are_slower_beside_a_collective() -> None:
    """The gather takes 1 s. In this second, 0.5 s of the kernel's 2 s are done: it ends after 2.5 s."""
    lines = f"  %g = {GATHER}\n  %x = {WORK_OF_2}\n  %d = {TWO} all-gather-done(%g)"
    assert parts(play(lines, model=replace(MODEL, slowdown=0.5))) == {"memory": 2.5}
    lines = lines.replace(GATHER, GATHER.replace(WITHIN, "replica_groups={{0,1,2,3,4,5,6,7}}"))
    long = replace(MODEL, slowdown=0.5, devices_per_host=8)
    assert parts(play(lines, model=long)) == {"memory": 4.0, "collectives": 3.0}  # 7 s on the links


def test_transfers_to_and_from_the_host() -> None:
    lines = f"  %c = ({HOST_PART}, {PART}, u32[]) copy-start(%a)\n  %x = {WORK_OF_2}\n  %d = {HOST_PART} copy-done(%c)"
    assert parts(play(lines)) == {"memory": 2.0, "host": 2.0}
    assert play(lines).busy["to host"] == pytest.approx(4.0)
    lines = f"  %c = ({PART}, {HOST_PART}, u32[]) copy-start(%h)\n  %d = {PART} copy-done(%c)"
    assert parts(play(lines)) == {"host": 4.0}
    assert play(lines).busy["from host"] == pytest.approx(4.0)


BODY = f"""%body (p: (s32[], {PART})) -> (s32[], {PART}) {{
  %p = (s32[], {PART}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = {PART} get-tuple-element(%p), index=1
LINES
  ROOT %t = (s32[], {PART}) tuple(%i, %a)
}}

%condition (p: (s32[], {PART})) -> pred[] {{
  %p = (s32[], {PART}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(9)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
"""
LOOP = f"  %z = s32[] constant(0)\n  %t = (s32[], {PART}) tuple(%z, %a)\n"
LOOP += f"  %w = (s32[], {PART}) while(%t), condition=%condition, body=%body"
SEVEN = ', backend_config={"known_trip_count":{"n":"7"}}'


def test_loops() -> None:
    others = BODY.replace("LINES", f"  %x = {WORK_OF_2}")
    assert parts(play(LOOP + SEVEN, others)) == {"memory": 14.0}
    assert parts(play(LOOP + SEVEN, others, replace(MODEL, loop_seconds=1.0))) == {"memory": 21.0}


def test_a_loop_is_not_faster_than_its_links() -> None:
    others = BODY.replace("LINES", f"  %g = {GATHER.replace('{{0,1}}', '{{0,1,2,3}}')}\n  %x = {WORK_OF_2}")
    four = replace(MODEL, devices_per_host=4)
    assert parts(play(LOOP + SEVEN, others, four)) == {"memory": 14.0, "collectives": 7.0}  # 3 s per iteration


SCORES = (
    '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["1","1","8","8"]},"mask_type":"CAUSAL"}}'
)
ATTENTION = f'{PART} custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax", backend_config={SCORES}'


def test_attention() -> None:
    spent = play(f"  %x = {ATTENTION}")
    assert spent.flops["attention"] == 4 * 8 * 8 * 128 / 2
    assert list(parts(spent)) == ["attention"]
    layers = play(LOOP + SEVEN, BODY.replace("LINES", f"  %x = {ATTENTION}"))
    assert layers.seconds == pytest.approx(7 * spent.seconds)


def test_a_loop_over_further_documents_is_assumed_to_be_empty() -> None:
    others = BODY.replace("LINES", f"  %x = {ATTENTION}").replace("%n = s32[] constant(9)", "%n = s32[] add(%i, %i)")
    simulation = GpuSimulation(program(LOOP, others), MODEL)
    assert simulation.run().seconds == 0
    assert simulation.guessed_loops == []
    plain = BODY.replace("LINES", f"  %x = {WORK_OF_2}").replace("%n = s32[] constant(9)", "%n = s32[] add(%i, %i)")
    simulation = GpuSimulation(program(LOOP, plain), MODEL)
    simulation.run()
    assert simulation.guessed_loops
    step = gpu_step_time(program(LOOP, plain), chip_named("h100"), 0.0, False, 8)
    assert GUESSED_LOOP in step.doubts


def test_doubts() -> None:
    unknown = program(f'  %x = {PART} custom-call(%a), custom_call_target="mine"')
    step = gpu_step_time(unknown, chip_named("t4"), 0.0, True, 1)
    assert UNKNOWN_KERNEL in step.doubts
    assert (UNKNOWN_CHIP in step.doubts) == ("T4" not in GPU_VALIDATION.chips)


@cache
def sample() -> Module:
    """Return qwen3-0.6b on 8 H100: 4 rows of 1024 tokens each, fully sharded, full remat, attention by XLA."""
    return parse(lzma.decompress(SAMPLE.read_bytes()).decode())


LAYERS, EMBED, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 28, 1024, 16, 8, 128, 3072, 151936
ROWS, LENGTH = 4, 1024


def analytic_flops() -> float:
    """Return the FLOPs of matrix products. Each layer runs forward twice, except for its last projection."""
    tokens = ROWS * LENGTH
    last = MLP * EMBED
    weights = EMBED * HEAD * (2 * HEADS + 2 * KV_HEADS) + 2 * MLP * EMBED + last
    scores = 2 * LENGTH * HEADS * HEAD  # multiply-adds per token in two products, without use of the causal mask
    forward = LAYERS * (weights + scores)
    return 2.0 * tokens * (4 * forward - LAYERS * last + 3 * EMBED * VOCAB)


def test_a_real_program_has_the_flops_of_its_model() -> None:
    spent = GpuSimulation(sample(), replace(MODEL, cores=132)).run()
    assert spent.flops["matmul"] == pytest.approx(analytic_flops(), rel=0.02)


def test_the_floor_counts_the_calls_of_cublas() -> None:
    chip = chip_named("h100")
    floor = time_floor(sample(), PeakRates.of(chip))
    assert chip.bf16_flops is not None
    assert floor.seconds >= analytic_flops() / chip.bf16_flops * 0.9
    step = gpu_step_time(sample(), chip, 0.0, False, 8)
    assert step.floor_seconds < step.mid_seconds
    assert sum(step.parts_seconds.values()) == pytest.approx(step.mid_seconds)
    assert step.links == "NVLink"


def test_collectives_of_a_real_program() -> None:
    """Each layer gathers its weights twice and scatters its gradients once: 7/8 of their bfloat16 bytes."""
    model = replace(MODEL, devices_per_host=8, cores=132)
    spent = GpuSimulation(sample(), model).run()
    layer = EMBED * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * MLP * EMBED
    embedding = VOCAB * EMBED
    sent = 7 / 8 * (LAYERS * 3 * 2.0 * layer + (2 + 4) * embedding)
    assert spent.busy["links"] == pytest.approx(sent / MIB, rel=0.1)
    assert spent.busy["network"] == 0
    two_machines = GpuSimulation(sample(), replace(model, devices_per_host=4)).run()
    assert two_machines.busy["network"] == pytest.approx(spent.busy["links"], rel=0.1)
