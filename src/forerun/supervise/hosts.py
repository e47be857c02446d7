"""Which host of how many this is, and where the leader listens: from the command line, or with `auto` from the TPU."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.supervise.tpu_hosts import BY_HAND, TpuHosts, find_tpu_hosts

PORT = 8476
AUTO = "auto"


@dataclass(frozen=True)
class Hosts:
    """`leader` is the address of host 0 in the cluster: a name or an IP address, never "every interface"."""

    index: int = 0
    count: int = 1
    leader: str = "127.0.0.1"
    port: int = 0  # 0: any free one, for a run on one host

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise UserError(
                f"host {self.index} of {self.count} cannot be",
                why=f"hosts are counted from 0 to {max(self.count, 1) - 1}",
                fix="give each host its own index, from 0 to one less than the number of hosts",
            )
        if self.count > 1 and not 0 < self.port < 65536:
            raise UserError(
                f"port {self.port} is no port", why="all hosts must know where the leader listens", fix=f"e.g. {PORT}"
            )
        if is_everywhere(self.leader):
            raise UserError(
                f"'{self.leader}' is not the leader's address",
                why="it means every interface, and strangers could reach the run",
                fix="give the address that host 0 has inside the cluster (hostname -I shows it)",
            )

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def address(self) -> str:
        return spoken(self.leader, self.port)


def given(
    host: str | None, leader: str | None, find: Callable[[], TpuHosts | None] = lambda: find_tpu_hosts()
) -> Hosts:
    """Return the hosts that `--host` and `--leader` name: `I/N` and an address, or `auto`. Neither means one host."""
    if host is None and leader is None:
        return Hosts()
    if host == AUTO:
        return _of_slice(leader, find())
    index, slash, count = (host or "").partition("/")
    if not (slash and index.isdigit() and count.isdigit()):
        raise UserError(
            f"--host {host}: which host of how many?" if host else "--leader needs --host I/N",
            why="I/N is needed, and hosts are counted from 0; on the hosts of a TPU slice, auto reads both",
            fix="--host 0/4 on the first of four hosts, --host 3/4 on the last; or --host auto on a TPU slice",
        )
    if leader is None:
        raise UserError(
            "--host needs --leader",
            why="the hosts of a run meet where host 0 listens",
            fix="--leader with the address that host 0 has inside the cluster (hostname -I shows it)",
        )
    return parse(leader, int(index), int(count))


def _of_slice(leader: str | None, found: TpuHosts | None) -> Hosts:
    """Return the place of this host in its TPU slice. The first host leads, unless `--leader` names an address."""
    if found is None:
        raise UserError(
            "--host auto: this machine is not a host of a TPU slice",
            why="neither TPU_WORKER_ID with TPU_WORKER_HOSTNAMES nor Google's metadata server names its hosts",
            fix=BY_HAND,
        )
    if len(found.addresses) == 1:
        return Hosts()
    return parse(leader or spoken(found.addresses[0], PORT), found.index, len(found.addresses))


def parse(leader: str, index: int, count: int) -> Hosts:
    """From `host:port`, or `host` with the usual port; an IPv6 address stands in brackets."""
    host, port = leader, str(PORT)
    if leader.startswith("["):
        host, _, rest = leader[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif leader.count(":") == 1:
        host, port = leader.split(":")
    if not host or not port.isdigit():
        raise UserError(f"'{leader}' is not an address", why="HOST or HOST:PORT is needed", fix=f"e.g. 10.0.0.2:{PORT}")
    return Hosts(index, count, host, int(port))


def is_everywhere(address: str) -> bool:
    try:
        return not address or ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def bound_address(leader: str) -> str:
    """The leader's own IP address to listen on. It must be one of this machine's."""
    try:
        found = socket.getaddrinfo(leader, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(
            f"the leader's address '{leader}' is not known on its own host",
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
        f"host 0 cannot listen on '{leader}'",
        why="; ".join(tried) + "\nthe address belongs to another machine, or this is not host 0",
        fix="give the address of the machine that has index 0, or give this machine its own index",
    )


def _reachable(leader: str, found: str) -> str:
    """A name that means loopback on its own host (as Debian's /etc/hosts has it) would hide the leader from all."""
    named = leader != found and leader != "localhost"
    if named and ipaddress.ip_address(found).is_loopback:
        raise UserError(
            f"on host 0 the name '{leader}' means {found}, where no other host can reach it",
            why="/etc/hosts maps the machine's own name to loopback",
            fix="give the IP address that host 0 has inside the cluster (hostname -I shows it)",
        )
    return found


def spoken(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
