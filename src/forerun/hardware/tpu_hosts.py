"""The index of this host in its TPU slice, and the addresses of all hosts, as recorded by Google Cloud.

GKE sets `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES`. A Cloud TPU VM has the same values as attributes of its metadata
server. A host of several slices also has the `MEGASCALE_` values: variables in GKE, and lines of the attribute
`tpu-env` on a VM. jax reads the same names (`jax/_src/clusters/cloud_tpu_cluster.py`). Other machines of a cloud run,
such as machines with GPUs, have the addresses of all hosts in `FORERUN_HOSTS`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.hardware import maintenance_notice

# The recommended way to start a run: the same command on every host of a slice.
COMMAND = "forerun train job.yaml --host auto --secret secret"
EVERYWHERE = f"gcloud compute tpus tpu-vm ssh NAME --worker=all --command='{COMMAND}'"
BY_HAND = "give each host its own number: --host 0/4 --leader ADDRESS on the first of four, --host 1/4 on the next"
HOSTS_VARIABLE = "FORERUN_HOSTS"  # the addresses of all hosts in their order, separated by commas
MEGASCALE = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
MAX_BYTES = 1 << 20  # of an attribute: 1,024 hosts need less than 100 kB


@dataclass(frozen=True)
class TpuHosts:
    """The hosts of a slice, and the place of the slice among all slices of the run.

    The hosts of all slices are numbered one slice after the other. The first host of the first slice is the leader.
    """

    index: int  # of this host in `addresses`
    addresses: tuple[str, ...]
    slices: int = 1
    slice_index: int = 0
    coordinator: str | None = None  # the address of the leader; None: the first of `addresses`

    @property
    def number(self) -> int:
        """The index of this host among the hosts of all slices."""
        return self.slice_index * len(self.addresses) + self.index

    @property
    def count(self) -> int:
        """The number of hosts of all slices."""
        return self.slices * len(self.addresses)

    @property
    def leader(self) -> str:
        return self.coordinator or self.addresses[0]


def attribute(name: str) -> str | None:
    """Return an attribute of this machine from the metadata server, or None if it does not exist."""
    return maintenance_notice.read(maintenance_notice.metadata_url(), f"attributes/{name}", MAX_BYTES)


def is_own_address(address: str) -> bool:
    """Return whether an IP address belongs to this machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def find_tpu_hosts(
    environment: Mapping[str, str] = os.environ,
    attribute: Callable[[str], str | None] = attribute,
    is_own: Callable[[str], bool] = is_own_address,
) -> TpuHosts | None:
    """Return the hosts of this machine's slice, or None if neither the environment nor the metadata server has them.

    Raises:
        UserError: The values contradict each other, or those of several slices are incomplete.
    """
    records: Mapping[str, str] = environment
    index, names = environment.get("TPU_WORKER_ID"), environment.get("TPU_WORKER_HOSTNAMES")
    if index is None or names is None:
        if (index := attribute("agent-worker-number")) is None:
            if not (names := environment.get(HOSTS_VARIABLE, "")):
                return None
            listed = [name.strip() for name in names.split(",")]
            index = ",".join(str(number) for number, name in enumerate(listed) if is_own(name))
            records = {}
        else:
            names = attribute("worker-network-endpoints") or ""
            records = _records(attribute("tpu-env") or "") | dict(environment)
    addresses = tuple(_address(name.strip()) for name in names.split(",") if name.strip())
    if not index.isdecimal() or int(index) >= len(addresses) or len(set(addresses)) < len(addresses):
        raise UserError(
            "E-HOSTS-029",
            "--host auto: the TPU's own records contradict each other",
            why=f"this is worker {index!r}, and the workers are {names!r}",
            fix=BY_HAND,
        )
    slices, number, coordinator = (records.get(name, "") for name in MEGASCALE)
    if slices in ("", "1"):
        return TpuHosts(int(index), addresses)
    if not (slices.isdecimal() and number.isdecimal() and int(number) < int(slices) and coordinator):
        raise UserError(
            "E-HOSTS-028",
            f"--host auto: the records of the {slices} slices are incomplete",
            why=", ".join(f"{name}={records.get(name)!r}" for name in MEGASCALE),
            fix=BY_HAND,
        )
    return TpuHosts(int(index), addresses, int(slices), int(number), _address(coordinator))


def _address(name: str) -> str:
    """Return the address in an entry: `host`, `host:port`, or the last of `name:id:address` in older records."""
    parts = name.split(":")
    # An empty part means an IPv6 address such as `fd00::1`.
    return {2: parts[0], 3: parts[-1]}.get(len(parts), name) if all(parts) else name


def _records(text: str) -> dict[str, str]:
    """Return the values of the attribute `tpu-env`, whose lines are `NAME: 'value'`."""
    return dict(re.findall(r"^(\w+):\s*'?([^'\n]*?)'?\s*$", text, re.MULTILINE))
