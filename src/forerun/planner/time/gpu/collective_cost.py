"""The time of a collective of NCCL.

NCCL chooses an algorithm and a protocol by the size of the message. The model has the ring, two algorithms that only an
all-reduce has (NVLink SHARP, NVLS, within one machine, and trees between machines), and two protocols: LL has a low
latency and a part of the bandwidth, Simple the full bandwidth. The fastest combination counts. Bus bandwidth is defined
as in nccl-tests (doc/PERFORMANCE.md): the bytes that each GPU must send in a ring, divided by the time.

Between machines, each GPU has its own network adapter. A ring passes through all adapters of a machine. So its bus
bandwidth is the sum of the adapters whose GPUs are in the group, but at most that of the links within the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.collectives.replica_groups import replica_groups, source_target_pairs
from forerun.planner.time.gpu.gpu_model import GpuModel

LINKS, NETWORK = "links", "network"  # the queues of collectives
TREE_SHARE = 0.92  # bus bandwidth of trees relative to the ring, in NCCL's own tuning model (src/graph/tuning.cc)


@dataclass(frozen=True)
class GroupLayout:
    """One group of a collective: its devices, the machines that they are on, and the devices on each machine."""

    devices: int
    nodes: int

    @property
    def devices_per_node(self) -> float:
        return self.devices / self.nodes


def group_layout(x: Instruction, devices_per_host: int) -> GroupLayout:
    """Return the layout of the group that is spread over the most machines."""
    layouts = [
        GroupLayout(len(group), len({device // devices_per_host for device in group})) for group in replica_groups(x)
    ]
    return max(layouts, key=lambda layout: (layout.nodes, layout.devices), default=GroupLayout(1, 1))


def crosses_machines(x: Instruction, devices_per_host: int) -> bool:
    """Return whether a collective-permute sends between machines."""
    pairs = source_target_pairs(x)
    return any(source // devices_per_host != target // devices_per_host for source, target in pairs)


def collective_queue_and_seconds(model: GpuModel, computation: Computation, x: Instruction) -> tuple[str, float]:
    """Return (queue, seconds) of a collective. The queue names the slowest connection that it uses."""
    op = x.op.removesuffix("-start")
    size_bytes = sum(operand.size_bytes for name in x.operands if (operand := computation.by_name.get(name)))
    if op == "collective-permute":
        if crosses_machines(x, model.devices_per_host):
            return NETWORK, protocol_seconds(model, size_bytes, model.network_bytes_per_second, 1)
        return LINKS, protocol_seconds(model, size_bytes, model.link_bytes_per_second, 0)
    layout = group_layout(x, model.devices_per_host)
    if layout.devices < 2:
        return LINKS, 0.0
    queue = LINKS if layout.nodes == 1 else NETWORK
    if op in ("all-to-all", "ragged-all-to-all"):
        return queue, _all_to_all_seconds(model, size_bytes, layout)
    seconds = ring_seconds(model, op, size_bytes, layout)
    if op == "all-reduce" and layout.nodes > 1:
        seconds = min(seconds, tree_seconds(model, size_bytes, layout))
    return queue, seconds


def ring_seconds(model: GpuModel, op: str, operand_bytes: float, layout: GroupLayout) -> float:
    """Return the time of an all-gather, all-reduce, reduce-scatter or broadcast. `operand_bytes` are per GPU.

    Within one machine, an all-reduce uses NVLS if that is faster.
    """
    bandwidth = _ring_bandwidth(model, layout)
    if layout.nodes == 1 and op == "all-reduce" and layout.devices > 2:
        bandwidth = max(bandwidth, model.nvls_bytes_per_second)
    return protocol_seconds(model, sent_bytes(op, operand_bytes, layout.devices), bandwidth, layout.nodes - 1)


def tree_seconds(model: GpuModel, operand_bytes: float, layout: GroupLayout) -> float:
    """Return the time of an all-reduce between machines with trees, whose depth is the logarithm of the machines."""
    sent = sent_bytes("all-reduce", operand_bytes, layout.devices)
    depth = layout.nodes.bit_length() - 1
    return protocol_seconds(model, sent, _ring_bandwidth(model, layout) * TREE_SHARE, depth)


def _ring_bandwidth(model: GpuModel, layout: GroupLayout) -> float:
    if layout.nodes == 1:
        return model.link_bytes_per_second
    return min(model.link_bytes_per_second, layout.devices_per_node * model.network_bytes_per_second)


def sent_bytes(op: str, operand_bytes: float, devices: int) -> float:
    """Return the bytes that each GPU sends in a ring: the numerator of the bus bandwidth."""
    if op == "all-gather":
        return operand_bytes * (devices - 1)
    if op == "collective-broadcast":
        return operand_bytes
    others = (devices - 1) / devices
    return operand_bytes * others * (2 if op == "all-reduce" else 1)


def protocol_seconds(model: GpuModel, sent: float, bytes_per_second: float, hops: int) -> float:
    """Return the time with the faster of two protocols. `hops` is the number of machines that data passes in turn."""
    latency = model.node_seconds * hops
    low_latency = model.collective_seconds + sent / (bytes_per_second * model.latency_protocol_share)
    bulk = model.bulk_collective_seconds + sent / bytes_per_second
    return latency + min(low_latency, bulk)


def _all_to_all_seconds(model: GpuModel, operand_bytes: float, layout: GroupLayout) -> float:
    """Return the time of an all-to-all: each GPU sends an equal part to each other GPU."""
    part = operand_bytes / layout.devices
    within = part * (layout.devices_per_node - 1)
    across = part * (layout.devices - layout.devices_per_node)
    seconds = within / model.link_bytes_per_second
    if layout.nodes > 1:
        seconds = max(seconds, across / model.network_bytes_per_second)
    return seconds + model.collective_seconds + model.node_seconds * (layout.nodes - 1)
