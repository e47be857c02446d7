"""Transfers by hand: bytes over bandwidth plus latency, and which way they go."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.transfers import copy_queue_and_seconds, goes_back

MIB = 2**20
LINK, HBM, HOST = 100e9, 1e12, 20e9
MACHINE = ChipModel(
    clock_hz=1e9,
    matmul_flops=1e14,
    matmul_share=1.0,
    hbm_bytes_per_second=HBM,
    link_bytes_per_second=LINK,
    host_bytes_per_second=HOST,
    op_seconds=0.0,
    dma_seconds=0.0,
    hop_seconds=0.0,
    collective_seconds=0.0,
)
MIB_ARRAY = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"  # one MiB
WHOLE = "bf16[8,4096,128]{2,1,0:T(8,128)(2,1)}"


def module_of(line: str, others: str = "") -> Module:
    return parse(
        f"""HloModule m

{others}
ENTRY %main (part: {MIB_ARRAY}, whole: {WHOLE}) -> () {{
  %part = {MIB_ARRAY} parameter(0)
  %whole = {WHOLE} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %y = {line}
}}
"""
    )


@pytest.mark.parametrize(
    ("order", "name"),
    [(range(8), "a line"), ((0, 1, 2, 3, 7, 6, 5, 4), "around a 2 x 4 mesh"), ((4, 5, 6, 7), "a part of the slice")],
)
def test_the_two_ways_round_a_ring(order: tuple[int, ...], name: str) -> None:
    forth = list(zip(order, [*order[1:], order[0]], strict=True))
    back = [(target, source) for source, target in forth]

    def permute(pairs: list[tuple[int, int]]) -> bool:
        text = ",".join(f"{{{a},{b}}}" for a, b in sorted(pairs))
        line = f"{MIB_ARRAY} collective-permute(%part), source_target_pairs={{{text}}}"
        return goes_back(module_of(line).computations["main"].by_name["y"])

    assert (permute(forth), permute(back)) == (False, True), name
    assert (permute(forth[:-1]), permute([(b, a) for a, b in forth[:-1]])) == (False, True), "open at one end"


HOST_WHOLE = WHOLE.replace("(2,1)}", "(2,1)S(5)}")
VMEM_PART = MIB_ARRAY.replace("(2,1)}", "(2,1)S(1)}")
INNER = f"""%into (w: {HOST_WHOLE}, u: {MIB_ARRAY}, i: s32[]) -> {HOST_WHOLE} {{
  %w = {HOST_WHOLE} parameter(0)
  %u = {MIB_ARRAY} parameter(1)
  %i = s32[]{{:T(128)}} parameter(2)
  ROOT %d = {HOST_WHOLE} dynamic-update-slice(%w, %u, %i, %i, %i)
}}

%out_of (w: {HOST_WHOLE}, i: s32[]) -> {MIB_ARRAY} {{
  %w = {HOST_WHOLE} parameter(0)
  %i = s32[]{{:T(128)}} parameter(1)
  %s = {MIB_ARRAY} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={{1,4096,128}}
  ROOT %b = {MIB_ARRAY} bitcast(%s)
}}

%part_of (w: {WHOLE}) -> {VMEM_PART} {{
  %w = {WHOLE} parameter(0)
  ROOT %s = {VMEM_PART} slice(%w), slice={{[0:1], [0:4096], [0:128]}}
}}
"""
CONTEXT = "u32[]{:S(2)}"


@pytest.mark.parametrize(
    ("line", "queue", "seconds"),
    [
        (
            f"(({HOST_WHOLE}, {MIB_ARRAY}, s32[]), {HOST_WHOLE}, {CONTEXT}) "
            "async-start(%whole, %part, %zero), calls=%into",
            "to host",
            MIB / HOST,
        ),
        (
            f"(({HOST_WHOLE}, s32[]), {MIB_ARRAY}, {CONTEXT}) async-start(%whole, %zero), calls=%out_of",
            "from host",
            MIB / HOST,
        ),
        (f"(({WHOLE}), {VMEM_PART}, {CONTEXT}) async-start(%whole), calls=%part_of", "dma", MIB / HBM),
        (f"({VMEM_PART}, {MIB_ARRAY}, {CONTEXT}) copy-start(%part)", "dma", MIB / HBM),
        (f"({MIB_ARRAY}, {VMEM_PART}, {CONTEXT}) copy-start(%part)", "dma", MIB / HBM),
        (f"({MIB_ARRAY}, {MIB_ARRAY}, {CONTEXT}) copy-start(%part)", "dma", 2 * MIB / HBM),
        (f"({HOST_WHOLE}, {WHOLE}, {CONTEXT}) copy-start(%whole)", "to host", 8 * MIB / HOST),
        (f"({WHOLE}, {HOST_WHOLE}, {CONTEXT}) copy-start(%whole)", "from host", 8 * MIB / HOST),
    ],
)
def test_copies(line: str, queue: str, seconds: float) -> None:
    module = module_of(line, INNER)
    found_queue, found_seconds = copy_queue_and_seconds(MACHINE, module, module.computations["main"].by_name["y"])
    assert found_queue == queue
    assert found_seconds == pytest.approx(seconds, abs=3e-6 if "host" in queue else 0)
