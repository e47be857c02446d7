"""Collectives against the definition of bus bandwidth in nccl-tests, and against its published results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import Instruction, parse
from forerun.planner.time.gpu.collective_cost import (
    GroupLayout,
    collective_queue_and_seconds,
    crosses_machines,
    group_layout,
    ring_seconds,
    tree_seconds,
)
from forerun.planner.time.gpu.gpu_model import GpuModel, assumed_gpu

GB = 1e9
NODE = GroupLayout(8, 1)


def model(chip: str = "h100", **changes: float) -> GpuModel:
    return replace(assumed_gpu(chip_named(chip), 8), **changes)


def without_latency(chip: str = "h100") -> GpuModel:
    return model(chip, collective_seconds=0.0, bulk_collective_seconds=0.0, node_seconds=0.0)


# doc/PERFORMANCE.md of nccl-tests: size is that of the complete array. busbw = size / seconds x factor.
FACTORS = {"all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n}
FACTORS["reduce-scatter"] = FACTORS["all-gather"]


@pytest.mark.parametrize("op", list(FACTORS))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_bus_bandwidth_is_that_of_the_links(op: str, devices: int) -> None:
    gpu, size = without_latency("a100-80"), 8 * GB
    operand = size / devices if op == "all-gather" else size  # an all-gather's operand is one part of the array
    seconds = ring_seconds(gpu, op, operand, GroupLayout(devices, 1))
    assert size / seconds * FACTORS[op](devices) == pytest.approx(gpu.link_bytes_per_second)


def test_nvlink_sharp_only_for_all_reduce_within_a_machine() -> None:
    gpu, size = without_latency(), 8 * GB

    def bandwidth(op: str, layout: GroupLayout) -> float:
        operand = size / layout.devices if op == "all-gather" else size
        return size / ring_seconds(gpu, op, operand, layout) * FACTORS[op](layout.devices)

    assert bandwidth("all-reduce", NODE) == pytest.approx(gpu.nvls_bytes_per_second)
    assert bandwidth("all-gather", NODE) == pytest.approx(gpu.link_bytes_per_second)
    assert bandwidth("all-reduce", GroupLayout(2, 1)) == pytest.approx(gpu.link_bytes_per_second)
    # Two machines with eight adapters each: the links within a machine are slower than the adapters together.
    assert bandwidth("all-gather", GroupLayout(16, 2)) == pytest.approx(
        min(gpu.link_bytes_per_second, 8 * gpu.network_bytes_per_second)
    )
    # One GPU of each machine: only its own adapter.
    assert bandwidth("all-reduce", GroupLayout(2, 2)) == pytest.approx(gpu.network_bytes_per_second)


@pytest.mark.parametrize(
    ("chip", "size", "low", "high"),
    [
        # Bus bandwidth of all_reduce_perf on 8 GPUs. H100: 476 GB/s for large arrays (nccl-tests issue 290).
        ("h100", 8 * GB, 460, 490),
        ("h100", 16e6, 200, 330),
        ("a100-80", 8 * GB, 220, 245),
        ("b200", 8 * GB, 780, 850),  # GB200: 835 (coreweave/nccl-tests pull request 43)
    ],
)
def test_all_reduce_is_near_published_measurements(chip: str, size: float, low: float, high: float) -> None:
    busbw = size / ring_seconds(model(chip), "all-reduce", size, NODE) * FACTORS["all-reduce"](8)
    assert low * GB <= busbw <= high * GB


def test_small_messages_take_the_latency_of_the_low_latency_protocol() -> None:
    gpu = model()
    assert ring_seconds(gpu, "all-reduce", 8, NODE) == pytest.approx(gpu.collective_seconds, rel=1e-4)
    two = ring_seconds(gpu, "all-reduce", 8, GroupLayout(16, 2))
    assert two == pytest.approx(gpu.collective_seconds + gpu.node_seconds, rel=1e-4)


def test_trees_are_for_small_all_reduces_of_many_machines() -> None:
    """The constants are those of NCCL's tuning.cc: log2(nodes) hops, and 0.92 of the bandwidth."""
    gpu = model()
    many, two = GroupLayout(512, 64), GroupLayout(16, 2)
    assert tree_seconds(gpu, 8, many) == pytest.approx(gpu.collective_seconds + 6 * gpu.node_seconds, rel=1e-3)
    assert ring_seconds(gpu, "all-reduce", 8, many) == pytest.approx(
        gpu.collective_seconds + 63 * gpu.node_seconds, rel=1e-3
    )
    size = 64 * GB
    for layout in (many, two):
        ratio = tree_seconds(gpu, size, layout) / ring_seconds(gpu, "all-reduce", size, layout)
        assert ratio == pytest.approx(1 / 0.92, rel=1e-2)


def collective(line: str) -> tuple[str, float]:
    text = f"""HloModule m

ENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {{
  %a = bf16[1024,1024]{{1,0}} parameter(0)
  ROOT %x = {line}
}}
"""
    entry = parse(text).computations["main"]
    return collective_queue_and_seconds(without_latency(), entry, entry.by_name["x"])


def test_instructions() -> None:
    """An operand of 2 MiB, without latency."""
    gpu, size = without_latency(), 2 * 2**20
    shape = "bf16[1024,1024]{1,0}"
    gathered = f"({shape}, bf16[8192,1024]{{1,0}}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={{0}}"
    assert collective(gathered) == ("links", pytest.approx(7 * size / gpu.link_bytes_per_second))
    across = f"{shape} all-reduce-start(%a), replica_groups=[8,2]<=[2,8]T(1,0)"
    assert collective(across) == ("network", pytest.approx(size / gpu.network_bytes_per_second))
    exchanged = f"{shape} all-to-all(%a), replica_groups=[1,8]<=[8], dimensions={{0}}"
    assert collective(exchanged) == ("links", pytest.approx(7 / 8 * size / gpu.link_bytes_per_second))
    both = f"{shape} all-to-all(%a), replica_groups=[1,16]<=[16], dimensions={{0}}"
    assert collective(both) == ("network", pytest.approx(8 / 16 * size / gpu.network_bytes_per_second))
    sent = f"{shape} collective-permute(%a), source_target_pairs={{{{0,1}},{{1,0}}}}"
    assert collective(sent) == ("links", pytest.approx(size / gpu.link_bytes_per_second))
    alone = f"{shape} all-reduce(%a), replica_groups=[8,1]<=[8]"
    assert collective(alone) == ("links", 0.0)


def instruction(attributes: str) -> Instruction:
    return Instruction("x", "all-reduce", (), (), "", attributes, False)


@pytest.mark.parametrize(
    ("attributes", "layout"),
    [
        (", replica_groups={}", GroupLayout(1, 1)),
        ("replica_groups=[1,16]<=[16]", GroupLayout(16, 2)),
        ("replica_groups=[2,8]<=[16]", GroupLayout(8, 1)),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", GroupLayout(2, 2)),
        ("replica_groups={{0,8},{1,9}}", GroupLayout(2, 2)),
    ],
)
def test_machines_of_a_group(attributes: str, layout: GroupLayout) -> None:
    assert group_layout(instruction(attributes), 8) == layout


def test_permutes_between_machines() -> None:
    assert not crosses_machines(instruction("source_target_pairs={{0,1},{1,0}}"), 8)
    assert crosses_machines(instruction("source_target_pairs={{0,1},{7,8}}"), 8)
