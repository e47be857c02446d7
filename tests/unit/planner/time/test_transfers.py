"""Transfers by hand: bytes over bandwidth plus latency, and which way they go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.transfers import collective_seconds, copy_queue_and_seconds, goes_back, group_size

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
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"


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


def collective(line: str, machine: ChipModel = MACHINE) -> float:
    main = module_of(line).computations["main"]
    return collective_seconds(machine, main, main.by_name["y"])


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['data'=2,'fsdp'=8,'tp'=4] {'fsdp'}", 8),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8,'axis_2'=4] {'axis_0','axis_1'}", 16),
    ],
)
def test_group_size(groups: str, devices: int) -> None:
    main = module_of(f"{MIB_ARRAY} all-reduce(%part), channel_id=1, {groups}, to_apply=%add").computations["main"]
    assert group_size(main.by_name["y"]) == devices


@pytest.mark.parametrize(
    ("line", "mib_through_a_link"),
    [
        # Seven of eight parts arrive, half of them from either side.
        (f"{WHOLE} all-gather(%part), {EIGHT}, dimensions={{0}}", 7 / 2),
        (f"({MIB_ARRAY}, {WHOLE}) all-gather-start(%part), {EIGHT}, dimensions={{0}}", 7 / 2),
        (
            f"(({MIB_ARRAY}, {MIB_ARRAY}), ({WHOLE}, {WHOLE})) all-gather-start(%part, %part), {EIGHT}",
            7,
        ),
        (f"({WHOLE}, {WHOLE}) all-gather(%part, %part), {EIGHT}, dimensions={{0}}", 7),
        (f"{MIB_ARRAY} reduce-scatter(%whole), {EIGHT}, dimensions={{0}}, to_apply=%add", 7 / 2),
        # A reduce-scatter and an all-gather.
        (f"{WHOLE} all-reduce(%whole), {EIGHT}, to_apply=%add", 7),
        (f"{MIB_ARRAY} collective-permute(%part), source_target_pairs={{{{0,1}},{{1,0}}}}", 1),
        (
            f"({MIB_ARRAY}, {MIB_ARRAY}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%part), "
            "source_target_pairs={{0,1},{1,0}}",
            1,
        ),
        (f"{WHOLE} all-gather(%part), replica_groups={{{{0}},{{1}}}}, dimensions={{0}}", 0),
    ],
)
def test_bytes_over_a_ring(line: str, mib_through_a_link: float) -> None:
    assert collective(line) == pytest.approx(mib_through_a_link * MIB / LINK)


@pytest.mark.parametrize("devices", [1, 2, 4, 5, 8, 16])
def test_all_to_all_by_counting_hops(devices: int) -> None:
    """Every device sends a part to every other, the shorter way round; the busiest link says how long it takes."""
    groups = ",".join(map(str, range(devices)))
    line = f"{WHOLE} all-to-all(%whole), replica_groups={{{{{groups}}}}}, dimensions={{0}}"
    part = 8 * MIB / devices
    hops = sum(min(away, devices - away) for away in range(devices)) * devices
    per_link = hops * part / (2 * devices)
    assert collective(line) == pytest.approx(per_link / LINK)


def test_latency() -> None:
    machine = replace(MACHINE, hop_seconds=3e-6, collective_seconds=5e-6)
    line = f"{WHOLE} all-gather(%part), {EIGHT}, dimensions={{0}}"
    assert collective(line, machine) - collective(line) == pytest.approx(5e-6 + 8 * 3e-6)


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
