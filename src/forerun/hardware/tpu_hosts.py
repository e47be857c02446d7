"""The index of this host in its TPU slice, and the addresses of all hosts, as recorded by Google Cloud.

GKE sets `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES`. A Cloud TPU VM has the same values as attributes of its metadata
server. jax reads the same names (`jax/_src/clusters/cloud_tpu_cluster.py`). Other machines of a cloud run, such as
machines with GPUs, have the addresses of all hosts in `FORERUN_HOSTS`.
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
MAX_BYTES = 1 << 20  # of an attribute: 1,024 hosts need less than 100 kB


@dataclass(frozen=True)
class TpuHosts:
    """The hosts of a slice. `index` is this host's position in `addresses`. The first host is the leader."""

    index: int
    addresses: tuple[str, ...]


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
        UserError: The values contradict each other, or the machine belongs to several slices.
    """
    index, names = environment.get("TPU_WORKER_ID"), environment.get("TPU_WORKER_HOSTNAMES")
    if index is not None and names is not None:
        slices = environment.get("MEGASCALE_NUM_SLICES")
    elif (index := attribute("agent-worker-number")) is None:
        if not (names := environment.get(HOSTS_VARIABLE, "")):
            return None
        listed = [name.strip() for name in names.split(",")]
        index = ",".join(str(number) for number, name in enumerate(listed) if is_own(name))
        slices = None
    else:
        names = attribute("worker-network-endpoints") or ""
        slices = environment.get("MEGASCALE_NUM_SLICES") or _slices(attribute("tpu-env") or "")
    if slices not in (None, "", "1"):
        raise UserError(
            "E-HOSTS-028",
            f"--host auto: this machine belongs to {slices} slices",
            why="MEGASCALE_NUM_SLICES; forerun reads the hosts of one slice only",
            fix=BY_HAND,
        )
    addresses = tuple(_address(name.strip()) for name in names.split(",") if name.strip())
    if not index.isdecimal() or int(index) >= len(addresses) or len(set(addresses)) < len(addresses):
        raise UserError(
            "E-HOSTS-029",
            "--host auto: the TPU's own records contradict each other",
            why=f"this is worker {index!r}, and the workers are {names!r}",
            fix=BY_HAND,
        )
    return TpuHosts(int(index), addresses)


def _address(name: str) -> str:
    """Return the address in an entry: `host`, `host:port`, or the last of `name:id:address` in older records."""
    parts = name.split(":")
    # An empty part means an IPv6 address such as `fd00::1`.
    return {2: parts[0], 3: parts[-1]}.get(len(parts), name) if all(parts) else name


def _slices(text: str) -> str | None:
    """Return the number of slices in the text of the attribute `tpu-env`, or None."""
    found = re.search(r"^MEGASCALE_NUM_SLICES:\s*'?(\d+)'?\s*$", text, re.MULTILINE)
    return found[1] if found else None
