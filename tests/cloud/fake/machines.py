"""The machines behind the fake APIs: what runs on the hosts of a slice."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol


class Machines(Protocol):
    """Starts and stops the hosts of slices. `slice_name` is the name of the node, instance or instance group.

    The fake calls `start` in a thread of its own and reports the slice as READY when it has returned. `stop` returns
    when nothing of the slice runs any more. Every method may be called for an unknown slice and then does nothing.
    """

    def start(self, slice_name: str, zone: str, hosts: int, metadata: Mapping[str, str], accelerator: str) -> None: ...

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        """Return (external address, internal address) of each host, in the order of their index."""
        ...

    def host_keys(self, slice_name: str) -> list[list[str]]:
        """Return the ssh host keys of each host as `ssh-ed25519 AAAA...`; an empty list until sshd runs."""
        ...

    def notice(self, slice_name: str) -> None:
        """Announce a preemption: `instance/preempted` of the metadata server becomes TRUE."""
        ...

    def stop(self, slice_name: str, *, kill: bool) -> None:
        """Stop all hosts. `kill`: as power off; otherwise processes get SIGTERM and a short time to end."""
        ...


class NoMachines:
    """Addresses without machines, for tests of the APIs alone."""

    def __init__(self) -> None:
        self._hosts: dict[str, list[tuple[str, str]]] = {}
        self._next = 0

    def start(self, slice_name: str, zone: str, hosts: int, metadata: Mapping[str, str], accelerator: str) -> None:
        numbers = range(self._next, self._next + hosts)
        self._next += hosts
        self._hosts[slice_name] = [
            (f"203.0.{number // 250}.{number % 250 + 1}", f"10.128.{number // 250}.{number % 250 + 2}")
            for number in numbers
        ]

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        return self._hosts.get(slice_name, [])

    def host_keys(self, slice_name: str) -> list[list[str]]:
        return [[f"ssh-ed25519 AAAA{index:04}"] for index, _ in enumerate(self.addresses(slice_name))]

    def notice(self, slice_name: str) -> None:
        pass

    def stop(self, slice_name: str, *, kill: bool) -> None:
        self._hosts.pop(slice_name, None)


def machines_named(name: str, options: Mapping[str, Any]) -> Machines:
    """Return the backend `none`, `namespaces`, or the class `module:Class`, called with `options`."""
    if name == "none":
        return NoMachines()
    module, attribute = ("hosts.namespaces:NamespaceMachines" if name == "namespaces" else name).split(":")
    backend: Machines = getattr(importlib.import_module(module), attribute)(**options)
    return backend
