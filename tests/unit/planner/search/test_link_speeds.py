"""Estimated speeds of links: rings of TPUs, NVLink or PCIe in a machine, the network between machines."""

from __future__ import annotations

import pytest

from forerun.hardware.slices import slice_named
from forerun.planner.search.link_speeds import NETWORK_SHARE, NVLINK_SHARE, PCIE_SHARE, LinkSpeeds


def rate(name: str, size: int, stride: int) -> float:
    return LinkSpeeds.of(slice_named(name)).collective_bytes_per_second(size, stride)


def test_a_ring_of_tpus_uses_both_directions_of_a_link() -> None:
    link = slice_named("v6e-8").chip.link_bytes_per_second
    assert link is not None
    assert rate("v6e-8", 8, 1) == rate("v6e-16", 2, 8) == 2 * link


@pytest.mark.parametrize(
    ("name", "size", "stride", "gigabytes_per_second"),
    [
        ("h100-8", 8, 1, 450 * NVLINK_SHARE),
        ("a100-80-8", 2, 4, 300 * NVLINK_SHARE),
        ("4090-8", 8, 1, 32 * PCIE_SHARE),
        ("h100-8x2", 8, 1, 450 * NVLINK_SHARE),  # within each machine
        ("h100-8x2", 2, 8, 50 * NETWORK_SHARE),  # every GPU has one partner in the other machine
        ("h100-8x2", 16, 1, 8 * 50 * NETWORK_SHARE),  # eight GPUs of a machine share the traffic; less than NVLink
        ("b200-8x2", 4, 4, 2 * 50 * NETWORK_SHARE),
    ],
)
def test_gpus(name: str, size: int, stride: int, gigabytes_per_second: float) -> None:
    assert rate(name, size, stride) == pytest.approx(gigabytes_per_second * 1e9)


def test_offload_uses_pcie() -> None:
    assert LinkSpeeds.of(slice_named("h100-8")).host_bytes_per_second == pytest.approx(64e9 * PCIE_SHARE)
    assert LinkSpeeds.of(slice_named("l4-1")).host_bytes_per_second == pytest.approx(32e9 * PCIE_SHARE)
