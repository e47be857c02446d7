"""The file of `--on ssh:machines.yaml`: machines that the user has already. Nothing is rented or deleted."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cloud.record.entries import Option
from forerun.cloud.ssh.keys import require_openssh
from forerun.config.source import read_file
from forerun.errors import UserError

PROVIDER = "ssh"
_KEYS = {"address", "internal", "port", "host_key"}
_HOST_KEY = re.compile(r"(ssh-|ecdsa-|sk-)[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( .*)?")
_ADDRESS = re.compile(r"(?:[A-Za-z_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9.:-]*")


@dataclass(frozen=True)
class SshMachine:
    """An existing machine.

    Attributes:
      address: of ssh: `HOST` or `USER@HOST`. The user is root, or may use sudo without a password.
      internal: how the other machines reach it.
      host_keys: keys that it may prove; empty: those of the user's `known_hosts`.
    """

    address: str
    internal: str
    port: int
    host_keys: tuple[str, ...]

    @property
    def host(self) -> str:
        """The address without the user."""
        return self.address.rpartition("@")[2]


def read_machines(file: Path) -> tuple[SshMachine, ...]:
    """Return the machines in a file, in the order of their host index.

    Raises:
      UserError: the file cannot be read, or is not a list of machines.
    """
    tree = read_file(file).tree
    entries = tree.get("machines") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries or set(tree) != {"machines"}:
        raise _mistake(file, "it needs one key, `machines`, with a list")
    machines = tuple(_machine(file, number, entry) for number, entry in enumerate(entries))
    if len({(machine.host, machine.port) for machine in machines}) < len(machines):
        raise _mistake(file, "two machines have the same address")
    return machines


def machine_option(file: str) -> Option:
    """Return the option of a run on the machines of a file. They cost nothing, and their zone is the file."""
    path = Path(file).expanduser().resolve()
    count = len(read_machines(path))
    return Option(PROVIDER, f"{count} machine{'s' if count > 1 else ''}", str(path), "on-demand", count, 0.0)


def known_keys(machine: SshMachine) -> tuple[str, ...]:
    """Return the host keys of a machine, from the file or from the user's `known_hosts`."""
    if machine.host_keys:
        return machine.host_keys
    require_openssh()
    name = machine.host if machine.port == 22 else f"[{machine.host}]:{machine.port}"
    found = subprocess.run(["ssh-keygen", "-F", name], capture_output=True, encoding="utf-8", errors="replace")
    # A line has the names, the type and the key. Lines with a marker, such as @revoked, are not keys of the host.
    lines = [line.split() for line in found.stdout.splitlines() if not line.startswith(("#", "@"))]
    return tuple(f"{words[1]} {words[2]}" for words in lines if len(words) >= 3)


def _machine(file: Path, number: int, entry: Any) -> SshMachine:
    values = {"address": entry} if isinstance(entry, str) else entry
    place = f"machine {number}"
    if not isinstance(values, dict) or not set(values) <= _KEYS or not isinstance(values.get("address"), str):
        raise _mistake(file, f"{place} needs an address; the other keys are internal, port and host_key")
    address, port, key = values["address"], values.get("port", 22), values.get("host_key")
    if not _ADDRESS.fullmatch(address):
        raise _mistake(file, f"{place}: the address {address!r} is not HOST or USER@HOST")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise _mistake(file, f"{place}: the port {port!r} is not a number from 1 to 65535")
    if key is not None and not (isinstance(key, str) and _HOST_KEY.fullmatch(key)):
        raise _mistake(file, f"{place}: host_key is not a public key such as `ssh-ed25519 AAAA...`")
    internal = values.get("internal", address.rpartition("@")[2])
    return SshMachine(address, str(internal), port, () if key is None else (" ".join(key.split()[:2]),))


def _mistake(file: Path, why: str) -> UserError:
    return UserError(
        "E-CLOUD-038",
        f"{file} is not a file of machines",
        why=why,
        fix="write for example:\nmachines:\n  - address: root@10.0.0.5\n    host_key: ssh-ed25519 AAAA...",
    )
