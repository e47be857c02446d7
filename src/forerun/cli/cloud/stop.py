"""`forerun stop`: save a checkpoint of a cloud run, and delete its slice."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import files_of, providers_of_run
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Project

if TYPE_CHECKING:
    from forerun.cloud.control.actions import Action
    from forerun.cloud.control.run_view import ControlView
    from forerun.cloud.provider import HostAddress
    from forerun.cloud.record.entries import AttemptEntry, CloudRun, LeaseEntry

POLL_SECONDS = 2.0
REASON = "forerun stop"


@options_of("forerun.verbs.cloud_runs:fetch_run", omit=("to",))
def stop(name: str, *, no_wait: bool = False, project: Project | None = None) -> int:
    """Save a checkpoint of a cloud run, and delete its slice.

    Args:
      no_wait: end when the stop is requested, before it is done
    """
    from forerun.cloud.control.controller import Controller, holder_name
    from forerun.cloud.control.ledger import ledger_of
    from forerun.cloud.record.entries import StopEntry
    from forerun.cloud.record.read_entry import require_undamaged
    from forerun.cloud.view.project_state import cloud_time
    from forerun.cloud.view.snapshot import read_snapshot

    files = files_of(name, project)
    recorded = read_snapshot(files)
    assert recorded is not None
    snapshot = require_undamaged(recorded)
    if snapshot.is_over:
        print(f"{snapshot.run.name} has {'finished' if snapshot.finished else 'stopped'} already; nothing is billed")
        return 0
    providers = providers_of_run(project, snapshot)
    files.request_stop(StopEntry(cloud_time(tuple(providers.values()), time.time()), REASON))
    LineReporter(sys.stderr).info("stop requested: the hosts save a checkpoint, then the slice is deleted")
    if no_wait:
        print("forerun ps shows the slice until it is deleted")
        return 0
    controller = Controller(
        snapshot.run, files, providers, NoDelivery(), StopDisplay(), holder_name(), ledger=ledger_of(files.address)
    )
    view, _ = controller.follow(time.sleep, POLL_SECONDS)
    print(summary(view))
    return 0


def summary(view: ControlView) -> str:
    """Return what a stopped run has cost, and how to resume it."""
    name, folder = view.run.name, view.run.folder
    if view.finished is not None:
        return f"{name} has finished before the stop, cost ${view.cost_usd:.2f}; its results: forerun fetch {name}"
    return (
        f"{name} is stopped, cost ${view.cost_usd:.2f}; the slice is deleted\n"
        f"  checkpoints: {folder}\n"
        "  resume: the same command forerun run continues from the newest one"
    )


class NoDelivery:
    """Brings no job to hosts: a run that is being stopped needs no new slice."""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {}

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        """Do nothing."""

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""


class StopDisplay:
    """Prints a line when something changes."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, view: ControlView, action: Action) -> None:
        from forerun.cloud.control.actions import EndAttempt, Pause

        if isinstance(action, EndAttempt):
            self._tell(f"deleting {action.entry.resource} in {action.entry.option.zone}")
        elif isinstance(action, Pause) and view.hosts:
            step = "" if view.step is None else f" (step {view.step})"
            phases = sorted({host.entry.phase for host in view.hosts.values()})
            self._tell(f"hosts: {', '.join(phases)}{step}")

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        self._tell(f"waiting for {lease.holder}, which controls the run")

    def trouble(self, message: str) -> None:
        self._tell(message)

    def _tell(self, text: str) -> None:
        if text != self._last:
            LineReporter(sys.stderr).info(text)
        self._last = text
