"""The time of transfers between slices over the data-centre network (DCN).

The TPU compiler makes a collective over several slices a pair of host transfers: `send` and `recv` of the handler
`xla_megascale_runtime`. The runtime on the hosts carries out the collective between them.

- Data of a device: to its host, over the network, and back to the device. The three overlap, so the slowest counts.
- Network: the hosts of one position in all slices form a ring. An all-reduce sends 2 (n - 1) / n of the data over it.
- A host has about 25 GB/s, so 6.25 GB/s per TPU with four TPUs per host. Source: "How to Scale Your Model" (Google
  DeepMind, jax-ml.github.io/scaling-book), read in 2026-11. It is a nominal rate: the share that programs reach is
  unknown. The latency is assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.hardware.slices import Slice
from forerun.planner.hlo import Computation, Instruction

HANDLER = "xla_megascale_runtime"
HOST_BYTES_PER_SECOND = 25e9  # of the network card of one host, one way
LATENCY_SECONDS = 100e-6  # of one exchange between hosts (assumed)
QUEUE = "dcn"


@dataclass(frozen=True)
class SliceNetwork:
    """The network of several slices, as one device uses it."""

    slices: int
    bytes_per_second: float  # of one device, one way: its share of the host's network card
    pcie_bytes_per_second: float  # between the device and its host, one way

    @staticmethod
    def of(one: Slice, pcie_bytes_per_second: float) -> SliceNetwork | None:
        """Return the network of several slices, or None for one slice."""
        if one.slices == 1:
            return None
        return SliceNetwork(one.slices, HOST_BYTES_PER_SECOND / one.devices_per_host, pcie_bytes_per_second)

    def seconds(self, x: Instruction, size_bytes: float) -> float:
        """Return the time from a `send` of `size_bytes` to the end of its `recv`."""
        sent = size_bytes * self._share(x)
        return max(sent / self.bytes_per_second, size_bytes / self.pcie_bytes_per_second) + LATENCY_SECONDS

    def _share(self, x: Instruction) -> float:
        """Return the bytes that a device sends, relative to its operand."""
        kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', x.attributes)
        rest = (self.slices - 1) / self.slices
        if kind is None or kind[1] == "ALL_REDUCE":
            return 2 * rest
        if kind[1] == "ALL_GATHER":
            return self.slices - 1.0
        return rest if kind[1] in ("REDUCE_SCATTER", "ALL_TO_ALL") else 1.0


def crosses_slices(x: Instruction) -> bool:
    """Return whether a `send` or `recv` is one half of a collective between slices."""
    return x.op in ("send", "recv") and HANDLER in x.attributes


def rendezvous(x: Instruction) -> str:
    """Return the name that a `send` and its `recv` share."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', x.attributes)
    return f"{QUEUE} {found[1] if found else ''}"


def sent_bytes(computation: Computation, x: Instruction) -> float:
    """Return the bytes of the array that a `send` takes from the device."""
    operand = computation.operand(x, 0)
    return operand.size_bytes if operand is not None else 0.0
