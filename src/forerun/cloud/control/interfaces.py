"""What a controller needs besides the record and the providers: a way to the hosts, and a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forerun.cloud.control.actions import Action
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.provider import HostAddress
from forerun.cloud.record.entries import AttemptEntry, CloudRun, LeaseEntry


class JobDelivery(Protocol):
    """How a job gets to its hosts."""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        """Return the metadata of the slice: the startup script and the public ssh key. It contains no secret."""

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        """Copy the job to all hosts. Copying it again changes nothing.

        Args:
          ready_at: since when the slice is billed, as this controller knows it.

        Raises:
          CloudUnavailable: A host cannot be reached yet.
        """

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        """Return why the setup of a host failed before its agent could report it, or an empty text."""


class ControlDisplay(Protocol):
    """Shows what a controller does."""

    def show(self, view: ControlView, action: Action) -> None: ...

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        """Show that another controller acts."""

    def trouble(self, message: str) -> None:
        """Show that a call failed and is repeated, or that a file is damaged."""
