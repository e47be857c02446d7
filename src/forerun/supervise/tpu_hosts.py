"""Which host of a TPU slice this is, and the addresses of all of them, as Google's cloud records it.

GKE sets `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES`. A Cloud TPU VM has the same values as attributes of its metadata
server. jax reads the same names (`jax/_src/clusters/cloud_tpu_cluster.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.supervise import notice

# The recommended way to start a run: the same command on every host of a slice.
COMMAND = "forerun train job.yaml --host auto --secret secret"
EVERYWHERE = f"gcloud compute tpus tpu-vm ssh NAME --worker=all --command='{COMMAND}'"
BY_HAND = "give each host its own number: --host 0/4 --leader ADDRESS on the first of four, --host 1/4 on the next"
MOST_BYTES = 1 << 20  # of an attribute: 1,024 hosts need less than 100 kB


@dataclass(frozen=True)
class TpuHosts:
    """`index` is this host's place in `addresses`, which lists every host of the slice; the first one leads."""

    index: int
    addresses: tuple[str, ...]


def attribute(name: str) -> str | None:
    """Return an attribute of this machine from the metadata server, or None if there is none."""
    return notice.read(notice.URL, f"attributes/{name}", MOST_BYTES)


def find_tpu_hosts(
    environment: Mapping[str, str] = os.environ, attribute: Callable[[str], str | None] = attribute
) -> TpuHosts | None:
    """Return the hosts of this machine's slice, or None where nothing names them.

    Raises:
      UserError: the values contradict each other, or there are several slices.
    """
    index, names = environment.get("TPU_WORKER_ID"), environment.get("TPU_WORKER_HOSTNAMES")
    if index is not None and names is not None:
        slices = environment.get("MEGASCALE_NUM_SLICES")
    elif (index := attribute("agent-worker-number")) is None:
        return None
    else:
        names = attribute("worker-network-endpoints") or ""
        slices = environment.get("MEGASCALE_NUM_SLICES") or _slices(attribute("tpu-env") or "")
    if slices not in (None, "", "1"):
        raise UserError(
            f"--host auto: this machine belongs to {slices} slices",
            why="MEGASCALE_NUM_SLICES; forerun reads the hosts of one slice only",
            fix=BY_HAND,
        )
    addresses = tuple(_address(name.strip()) for name in names.split(",") if name.strip())
    if not index.isdecimal() or int(index) >= len(addresses) or len(set(addresses)) < len(addresses):
        raise UserError(
            "--host auto: the TPU's own records contradict each other",
            why=f"this is worker {index!r}, and the workers are {names!r}",
            fix=BY_HAND,
        )
    return TpuHosts(int(index), addresses)


def _address(name: str) -> str:
    """Return the address in an entry: `host`, `host:port`, or the last of `name:id:address` in older records."""
    parts = name.split(":")
    return {2: parts[0], 3: parts[-1]}.get(len(parts), name) if all(parts) else name  # `fd00::1` is an address


def _slices(text: str) -> str | None:
    found = re.search(r"^MEGASCALE_NUM_SLICES:\s*'?(\d+)'?\s*$", text, re.MULTILINE)
    return found[1] if found else None
