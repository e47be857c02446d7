"""The index of this host, the number of hosts and the address of the leader, from the command line or from the TPU."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.hardware.devices import ThisMachine
from forerun.hardware.tpu_hosts import BY_HAND, TpuHosts, find_tpu_hosts

PORT = 8476
AUTO = "auto"
# With one of these variables, the user has selected chips of this host, or another layout than the complete slice.
CHIP_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")


@dataclass(frozen=True)
class Hosts:
    """The place of this host in a run.

    `leader` is the address of host 0 inside the cluster: a name or an IP address, but not one that means "every
    interface".
    """

    index: int = 0
    count: int = 1
    leader: str = "127.0.0.1"
    port: int = 0  # 0 selects a free port, for a run on one host

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise UserError(
                "E-HOSTS-008",
                f"host {self.index} of {self.count} does not exist",
                why=f"hosts are counted from 0 to {max(self.count, 1) - 1}",
                fix="give each host its own index, from 0 to one less than the number of hosts",
            )
        if self.count > 1 and not 0 < self.port < 65536:
            raise UserError(
                "E-HOSTS-009",
                f"port {self.port} is not valid",
                why="all hosts must know where the leader listens",
                fix=f"give a port from 1 to 65535, for example {PORT}",
            )
        if is_unspecified_address(self.leader):
            raise UserError(
                "E-HOSTS-010",
                f"'{self.leader}' is not the leader's address",
                why="it means every interface, so machines outside the cluster could reach the run",
                fix="give the address that host 0 has inside the cluster (hostname -I shows it)",
            )

    @property
    def leads(self) -> bool:
        """Whether this host runs the leader."""
        return self.index == 0

    @property
    def address(self) -> str:
        """The address of the leader with its port."""
        return spoken(self.leader, self.port)


def given(
    host: str | None, leader: str | None, find: Callable[[], TpuHosts | None] = lambda: find_tpu_hosts()
) -> Hosts:
    """Return the place of this host, from the values of `--host` and `--leader`.

    Args:
        host: `I/N`, `auto` or None. With `auto`, the TPU slice provides the values.
        leader: The address of host 0, or None. If both values are None, the run has one host.
        find: Returns the hosts of the TPU slice, or None on other machines.

    Raises:
        UserError: The values are not valid, or `auto` was used on another machine than a host of a TPU slice.
    """
    if host is None and leader is None:
        return Hosts()
    if host == AUTO:
        return _of_slice(leader, find())
    index, slash, count = (host or "").partition("/")
    if not (slash and index.isdigit() and count.isdigit()):
        raise UserError(
            "E-HOSTS-011",
            f"--host {host} does not name an index and a number of hosts" if host else "--leader needs --host I/N",
            why="the form is I/N, and hosts are counted from 0; on a TPU slice, auto reads both numbers",
            fix="--host 0/4 on the first of four hosts, --host 3/4 on the last; or --host auto on a TPU slice",
        )
    if leader is None and (int(index), int(count)) == (0, 1):
        return Hosts()
    if leader is None:
        raise UserError(
            "E-HOSTS-012",
            "--host needs --leader",
            why="all hosts of a run connect to host 0",
            fix="--leader with the address that host 0 has inside the cluster (hostname -I shows it)",
        )
    return parse(leader, int(index), int(count))


def discover(
    device: str | tuple[str, ...],
    environment: Mapping[str, str] = os.environ,
    attached: Callable[[], str | None] | None = None,
    find: Callable[[], TpuHosts | None] = lambda: find_tpu_hosts(),
) -> Hosts | None:
    """Return the place of this host in its TPU slice, for a command without `--host` and `--leader`.

    Return None if the run has one host: the machine has no TPU, its slice has one host, the job is for another device,
    or the environment selects single chips. The metadata server is asked only on a machine with a TPU.

    Args:
        device: `device` of the job.
        attached: Returns the TPU of this machine, or None.
        find: Returns the hosts of the TPU slice, or None.
    """
    wanted = (device,) if isinstance(device, str) else device
    platforms = environment.get("JAX_PLATFORMS", "")
    if wanted[0] not in (AUTO, "tpu") or (platforms and "tpu" not in platforms):
        return None
    if any(environment.get(name) for name in CHIP_VARIABLES) or (attached or ThisMachine().attached_tpu)() is None:
        return None
    found = find()
    return None if found is None or found.count == 1 else _of_slice(None, found)


def _of_slice(leader: str | None, found: TpuHosts | None) -> Hosts:
    """Return the place of this host in its TPU slices. The first host leads, unless `--leader` names an address."""
    if found is None:
        raise UserError(
            "E-HOSTS-013",
            "--host auto: this machine is not a host of a TPU slice",
            why="neither TPU_WORKER_ID with TPU_WORKER_HOSTNAMES nor Google's metadata server names its hosts",
            fix=BY_HAND,
        )
    if found.count == 1:
        return Hosts()
    return parse(leader or spoken(found.leader, PORT), found.number, found.count)


def parse(leader: str, index: int, count: int) -> Hosts:
    """Return the place of host `index` of `count`. `leader` is `host:port`, or `host` for the default port.

    An IPv6 address with a port is written in brackets.
    """
    host, port = leader, str(PORT)
    if leader.startswith("["):
        host, _, rest = leader[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif leader.count(":") == 1:
        host, port = leader.split(":")
    if not host or not port.isdigit():
        raise UserError(
            "E-HOSTS-014",
            f"'{leader}' is not an address",
            why="HOST or HOST:PORT is needed",
            fix=f"give an address such as 10.0.0.2:{PORT}",
        )
    return Hosts(index, count, host, int(port))


def is_unspecified_address(address: str) -> bool:
    """Return whether an address means every network interface, such as 0.0.0.0."""
    try:
        return not address or ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def bound_address(leader: str) -> str:
    """Return the IP address on which the leader listens. Raise UserError if it does not belong to this machine."""
    try:
        found = socket.getaddrinfo(leader, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(
            "E-HOSTS-015",
            f"host 0 cannot resolve the leader's address '{leader}'",
            why=str(error),
            fix="give the IP address that host 0 has inside the cluster (hostname -I shows it)",
        ) from error
    tried = []
    for family, _, _, _, where in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((where[0], 0))
            except OSError as error:
                tried.append(f"{where[0]}: {error.strerror}")
            else:
                return _reachable(leader, str(where[0]))
    raise UserError(
        "E-HOSTS-016",
        f"host 0 cannot listen on '{leader}'",
        why="; ".join(tried) + "\nthe address belongs to another machine, or this is not host 0",
        fix="give the address of the machine that has index 0, or give this machine its own index",
    )


def _reachable(leader: str, found: str) -> str:
    """Return `found`, or raise UserError if the name `leader` resolves to loopback.

    Debian's /etc/hosts maps the name of a machine to loopback, where other hosts cannot reach it.
    """
    named = leader != found and leader != "localhost"
    if named and ipaddress.ip_address(found).is_loopback:
        raise UserError(
            "E-HOSTS-017",
            f"on host 0 the name '{leader}' means {found}, where no other host can reach it",
            why="/etc/hosts maps the machine's own name to loopback",
            fix="give the IP address that host 0 has inside the cluster (hostname -I shows it)",
        )
    return found


def spoken(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
