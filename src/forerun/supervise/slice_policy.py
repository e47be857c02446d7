"""The slices of a run: which hosts form them, and with how many of them the run may continue."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from forerun.units import Seconds


@dataclass(frozen=True)
class SlicePolicy:
    """The slices of a run. The hosts of a slice have consecutive numbers, and the first slice has the leader.

    `least` is the job's `mesh.min_slices`. It is equal to `slices` if the run needs all of them. Then a lost slice is
    waited for like any other lost host. `wait_seconds` is the time for which a lost slice is waited for otherwise.
    """

    hosts: int = 1
    slices: int = 1
    least: int = 1
    wait_seconds: float = 60.0

    @classmethod
    def of(cls, hosts: int, slices: int | None, least: int | None, wait_seconds: float) -> SlicePolicy:
        """Return the policy of a run, from the number of its hosts and its job's keys.

        Hosts that do not divide into slices form one slice: `slice_variables` reports the mistake.
        """
        count = slices if slices is not None and hosts > 1 and hosts % slices == 0 else 1
        return cls(hosts, count, count if least is None else min(least, count), wait_seconds)

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with fewer slices."""
        return self.least < self.slices

    @property
    def hosts_per_slice(self) -> int:
        return self.hosts // self.slices

    def slice_of(self, host: int) -> int:
        """Return the number of the slice of a host."""
        return host // self.hosts_per_slice

    def slices_of(self, hosts: Collection[int]) -> list[int]:
        """Return the numbers of the slices that have at least one of these hosts, in ascending order."""
        return sorted({self.slice_of(host) for host in hosts})

    def remaining_hosts(self, absent: Collection[int]) -> tuple[int, ...]:
        """Return the hosts of all complete slices, or () if the run cannot continue with them.

        The first slice must be complete, because its first host has the leader and the coordinator of jax.
        """
        lost = self.slices_of(absent)
        if not self.is_elastic or 0 in lost or self.slices - len(lost) < self.least:
            return ()
        return tuple(host for host in range(self.hosts) if self.slice_of(host) not in lost)

    def count_of(self, hosts: Collection[int]) -> int | None:
        """Return the number of slices that these hosts form, or None for a run that does not count slices."""
        return None if self.slices == 1 else len(hosts) // self.hosts_per_slice

    def spoken(self, hosts: Collection[int]) -> str:
        """Return the slices of these hosts for messages, such as "slice 1 (host 2, 3)"."""
        numbers = self.slices_of(hosts)
        listed = ", ".join(map(str, sorted(hosts)))
        return f"slice{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} (host {listed})"

    def requirement(self) -> str:
        """Return a sentence about when a run continues with fewer slices, or "" if it never does."""
        if not self.is_elastic:
            return ""
        return (
            f"after {Seconds(self.wait_seconds)} the run continues with at least {self.least} of {self.slices} slices, "
            "but not without a host of slice 0, which has the leader"
        )
