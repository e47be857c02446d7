"""Estimated speeds of the links of a slice, for ordering candidates without a compiler."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.hardware.slices import Slice

TPU_LINK_BYTES_PER_SECOND, TPU_HOST_BYTES_PER_SECOND = 45e9, 20e9
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.6, 0.8  # shares of the data sheet's rates; assumed, 2026-11
NETWORK_BYTES_PER_SECOND = 1.5e9  # per GPU without a figure: 100 Gbit/s for eight GPUs; assumed, 2026-11


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds of one device, one way. A TPU's collectives use both directions of one link at the same time."""

    inside_bytes_per_second: float  # between devices of one machine; of all devices of a TPU slice
    network_bytes_per_second: float  # between machines
    host_bytes_per_second: float
    devices_per_machine: int

    @classmethod
    def of(cls, on: Slice) -> LinkSpeeds:
        """Return the speeds of a slice or of GPU machines."""
        gpu, link = on.chip.gpu, on.chip.link_bytes_per_second
        if gpu is None:
            both = 2 * (link or TPU_LINK_BYTES_PER_SECOND)
            return cls(both, both, TPU_HOST_BYTES_PER_SECOND, on.devices)
        pcie = gpu.pcie_bytes_per_second * PCIE_SHARE
        nvlink = gpu.nvlink_bytes_per_second
        return cls(
            inside_bytes_per_second=pcie if nvlink is None else nvlink * NVLINK_SHARE,
            network_bytes_per_second=(gpu.network_bytes_per_second or NETWORK_BYTES_PER_SECOND) * NETWORK_SHARE,
            host_bytes_per_second=pcie,
            devices_per_machine=on.devices // on.hosts,
        )

    def collective_bytes_per_second(self, size: int, stride: int) -> float:
        """Return the bytes per second that a device receives in a collective over an axis of the mesh.

        Args:
            size: The devices of the axis.
            stride: The distance of neighbours on the axis, in devices. The product of both decides whether the axis
                stays within a machine. Across machines, all devices of the axis in a machine share the traffic.
        """
        if size * stride <= self.devices_per_machine:
            return self.inside_bytes_per_second
        together = min(size, max(1, self.devices_per_machine // stride))
        across = self.network_bytes_per_second * together
        return across if together == 1 else min(self.inside_bytes_per_second, across)
