"""Times of collectives by hand: bytes on the busiest link over its rate, and latency by hops."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import ChipModel, chip_model_of
from forerun.planner.time.collectives.collective_cost import CollectiveCost
from forerun.planner.time.collectives.torus import Torus

MIB = 2**20
LINK = 100e9
MACHINE = ChipModel(
    clock_hz=1e9,
    matmul_flops=1e14,
    matmul_share=1.0,
    hbm_bytes_per_second=1e12,
    link_bytes_per_second=LINK,
    host_bytes_per_second=20e9,
    hop_seconds=0.0,
    collective_seconds=0.0,
    offload_seconds=0.0,
)
MIB_ARRAY = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"  # one MiB
WHOLE = "bf16[8,4096,128]{2,1,0:T(8,128)(2,1)}"
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"


def collective(line: str, machine: ChipModel = MACHINE, slice_name: str = "", offloaded: bool = False) -> float:
    module = parse(
        f"""HloModule m

ENTRY %main (part: {MIB_ARRAY}, whole: {WHOLE}) -> () {{
  %part = {MIB_ARRAY} parameter(0)
  %whole = {WHOLE} parameter(1)
  %y = {line}
}}
"""
    )
    main = module.computations["main"]
    torus = Torus.of(slice_named(slice_name)) if slice_name else None
    return CollectiveCost(module, machine, torus).seconds(main, main.by_name["y"], offloaded=offloaded)


def gather(groups: str, whole: str = WHOLE) -> str:
    return f"{whole} all-gather(%part), {groups}, dimensions={{0}}"


def reduce(groups: str) -> str:
    return f"{WHOLE} all-reduce(%whole), {groups}, to_apply=%add"


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


def test_latency_of_a_ring() -> None:
    """The farthest part comes half the way around: four links."""
    machine = replace(MACHINE, hop_seconds=3e-6, collective_seconds=5e-6)
    assert collective(gather(EIGHT), machine) - collective(gather(EIGHT)) == pytest.approx(5e-6 + 4 * 3e-6)


def iota(groups: int, size: int, inner: int = 1) -> str:
    """Groups of `size` partitions at a distance of `inner`."""
    if inner == 1:
        return f"replica_groups=[{groups},{size}]<=[{groups * size}]"
    outer = groups // inner
    return f"replica_groups=[{groups},{size}]<=[{outer},{size},{inner}]T(0,2,1)"


# MiB through the busiest link, for 8 MiB that are gathered or reduced.
@pytest.mark.parametrize(
    ("slice_name", "groups", "streams"),
    [
        ("v5e-256", iota(16, 16), 1),  # one closed axis
        ("v5e-256", iota(16, 16, 16), 1),  # the other axis
        ("v5e-256", iota(1, 256), 1),  # one ring through all chips
        ("v5e-256", iota(64, 4), 2),  # a quarter of an axis is open: the ring is folded, or comes back the same way
        ("v6e-64", iota(8, 8), 2),  # an axis of 8 has no wrap-around links
        ("v6e-64", iota(1, 64), 1),  # but a ring through 8 x 8 chips needs none
        ("v5e-8", iota(1, 8), 1),
        ("v5p-128", iota(16, 4), 1),  # 4x4x4 is closed
        ("v5p-128", iota(4, 16), 1),  # row by row: the link between rows is the wrap-around link
        ("v5p-32", iota(1, 16), 2),  # 2x2x4 is open: each row ends with a way back over the same links
        ("v5p-32", iota(8, 2), 2),
        ("v5p-8", iota(1, 4), 1),  # 2x2: along both axes, as fast as a closed ring
        ("v4-128", iota(4, 16, 4), 1),
    ],
)
def test_an_all_gather_is_one_ring(slice_name: str, groups: str, streams: int) -> None:
    size = int(groups.split(",")[1].split("]")[0])
    sent = 8 * MIB * (size - 1) / size / 2
    assert collective(gather(groups), slice_name=slice_name) == pytest.approx(streams * sent / LINK)


@pytest.mark.parametrize(
    ("slice_name", "groups", "mib"),
    [
        # All axes at once: 2 x (n - 1) / n x 8 MiB over 2 links per axis.
        ("v5e-256", iota(1, 256), 2 * 8 * 255 / 256 / 4),
        ("v5p-128", iota(1, 64), 2 * 8 * 63 / 64 / 6),
        ("v5p-128", iota(4, 16), 2 * 8 * 15 / 16 / 4),
        ("v5p-128", iota(16, 4), 2 * 8 * 3 / 4 / 2),
        # Open axes send over one link where closed ones send over two.
        ("v6e-64", iota(1, 64), 2 * 8 * 63 / 64 / 2),
        # 2x2x4, a third of the data for each color. The one that begins with the longest axis takes longest.
        ("v5p-32", iota(1, 16), 2 * 8 / 3 * (3 / 4 + 1 / 4 / 2 + 1 / 8 / 2)),
        # Short axes of v5e and v6e: one ring.
        ("v6e-8", iota(1, 8), 2 * 8 * 7 / 8 / 2),
    ],
)
def test_an_all_reduce_uses_all_axes(slice_name: str, groups: str, mib: float) -> None:
    assert collective(reduce(groups), slice_name=slice_name) == pytest.approx(mib * MIB / LINK)


def test_latency_along_axes() -> None:
    """Two phases of 16 chips, there and back: half of each axis at a time, not 256 hops."""
    machine = replace(MACHINE, hop_seconds=1e-6)
    found = collective(reduce(iota(1, 256)), machine, "v6e-256") - collective(reduce(iota(1, 256)), MACHINE, "v6e-256")
    assert found == pytest.approx(2 * (8 + 8) * 1e-6)


def test_all_reduce_of_a_published_microbenchmark() -> None:
    """v6e-256, 17408 x 68 bfloat16 per chip: 235.8 GB/s (tpu-recipes, microbenchmarks/trillium/collectives).

    Its bandwidth is 2 x bytes of a chip x 255 / 256 / seconds.
    """
    array = "bf16[17408,68]{0,1:T(8,128)(2,1)}"  # the layout that the compiler chooses
    size = 17408 * 68 * 2
    measured = 2 * size * 255 / 256 / 235.76e9
    module = parse(
        f"""HloModule m

ENTRY %main (part: {array}) -> {array} {{
  %part = {array} parameter(0)
  ROOT %y = {array} all-reduce(%part), {iota(1, 256)}, to_apply=%add
}}
"""
    )
    v6e, main = slice_named("v6e-256"), module.computations["main"]
    found = CollectiveCost(module, chip_model_of(v6e.chip), Torus.of(v6e)).seconds(main, main.by_name["y"])
    assert found == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("rows", "gb_per_second"), [(1024, 161.90), (4096, 174.77), (16384, 178.77)])
def test_all_gather_of_a_published_microbenchmark(rows: int, gb_per_second: float) -> None:
    """tpu7x 2x2x1, groups of 4 chips for each of both cores (accelerator-microbenchmarks, Ironwood, all_gather).

    Its bandwidth counts the parts of the three other chips for both cores of a chip.
    """
    part = rows * 8 * 128 * 4
    measured = 2 * 3 * part / (gb_per_second * 1e9)
    module = parse(
        f"""HloModule m

ENTRY %main (part: f32[{rows},8,128]) -> f32[{4 * rows},8,128] {{
  %part = f32[{rows},8,128]{{2,1,0:T(8,128)}} parameter(0)
  ROOT %y = f32[{4 * rows},8,128]{{2,1,0:T(8,128)}} all-gather(%part), {iota(2, 4, 2)}, dimensions={{0}}
}}
"""
    )
    tpu7x, main = slice_named("tpu7x-2x2x1"), module.computations["main"]
    found = CollectiveCost(module, chip_model_of(tpu7x.chip), Torus.of(tpu7x)).seconds(
        main, main.by_name["y"], offloaded=True
    )
    assert found == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("size", "streams"), [(16, 1), (4, 2)])
def test_a_permute_along_a_part_of_an_axis_comes_back_over_its_links(size: int, streams: int) -> None:
    """The last of four chips sends to the first one over the links on which permutes of the other direction send."""
    pairs = ",".join(f"{{{i},{i // size * size + (i + 1) % size}}}" for i in range(256))
    line = f"{MIB_ARRAY} collective-permute(%part), source_target_pairs={{{pairs}}}, {iota(256 // size, size)}"
    assert collective(line, MACHINE, "v5e-256") == pytest.approx(streams * MIB / LINK)


SLICES = ("v4-128", "v5e-16", "v5e-256", "v5p-32", "v5p-128", "v6e-64", "v6e-256", "tpu7x-2x2x1", "tpu7x-4x4x4")


def test_no_collective_is_faster_than_the_links_allow() -> None:
    """Every chip must receive the parts of the other chips through its links."""
    choice = random.Random(25)
    for _ in range(200):
        on = slice_named(choice.choice(SLICES))
        torus = Torus.of(on)
        inner = choice.choice([size for size in (1, 2, 4, 8, 16) if on.devices % size == 0])
        size = choice.choice([size for size in (2, 4, 8, 16, 64, 256) if (on.devices // inner) % size == 0] or [1])
        if size == 1:
            continue
        groups = iota(on.devices // size, size, inner)
        times, offloaded = choice.choice([1, 2]), choice.random() < 0.5
        line = gather(groups) if times == 1 else reduce(groups)
        found = collective(line, MACHINE, on.name, offloaded)
        chips = max(size // torus.cores, 1)  # at most all cores of a chip are in one group
        links = 2 * sum(side > 1 for side in torus.sides)
        least = times * 8 * MIB * (chips - 1) / chips / (links * LINK)
        assert found >= least * 0.999, (on.name, groups, line)
        assert prod(torus.sides) * torus.cores == on.devices
