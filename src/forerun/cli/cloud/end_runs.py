"""`forerun stop` and `forerun down`: end cloud runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import agrees, files_of, providers_of, providers_of_run
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Project, Value

if TYPE_CHECKING:
    from forerun.cloud.control.actions import Action
    from forerun.cloud.control.run_view import ControlView
    from forerun.cloud.provider import HostAddress, Resource
    from forerun.cloud.record.entries import AttemptEntry, CloudRun, LeaseEntry
    from forerun.cloud.view.project_state import ProjectState

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


# ---- forerun down ----


RECORD_SECONDS = 15.0  # how long buckets may delay the list, twice
# A request that a controller has sent before it saw the stop may appear in lists only now.
LATE_SECONDS = 10.0


@options_of("forerun.verbs.cloud_runs:fetch_run", omit=("to",))
def down(
    name: Annotated[str, Value("NAME", is_positional=True)] | None = None,
    *,
    all: bool = False,
    yes: bool = False,
    project: Project | None = None,
) -> int:
    """Delete the cloud resources of a run, or of all runs. Results stay in the bucket.

    Args:
      all: delete the resources of all runs in the project
      yes: do not ask before deleting
    """
    from forerun.cloud.record.read_entry import DamagedEntry
    from forerun.cloud.view.project_state import list_resources, read_project
    from forerun.cloud.view.removal import (
        folders_of,
        removal_targets,
        require_removed,
        resources_of,
        snapshots_of,
        take_down,
    )
    from forerun.cloud.view.run_location import is_address, known_runs

    _require_one_choice(name, all)
    known = (name, *known_runs()) if name is not None and is_address(name) else known_runs()
    state = read_project(lambda: providers_of(project), known, time.time(), RECORD_SECONDS)
    chosen = resources_of(name, state.resources)
    snapshots = snapshots_of(name, chosen, state.snapshots)
    if not chosen and not any(not snapshot.is_over for snapshot in snapshots.values()):
        if state.errors:
            raise state.errors[0]
        print("nothing of forerun exists in this project" if name is None else f"{name} has no resources")
        return 0
    targets = removal_targets(chosen)
    _show(chosen, state)
    LineReporter(sys.stderr).info("checkpoints and results stay in the bucket; forerun stop saves a checkpoint first")
    question = f"delete {_counted(len(targets), 'resource')}?" if targets else "end the runs without resources?"
    if not agrees(question, yes=yes):
        print("nothing is deleted")
        return 1
    by_name = {one.name: one for one in state.providers}
    unread = {folder: why for folder, why in state.unread.items() if folder in folders_of(chosen)}
    damaged = [folder for folder, why in unread.items() if isinstance(why, DamagedEntry)]
    result = take_down(targets, snapshots, by_name, state.now, LineReporter(sys.stderr), damaged)
    for folder, why in {**unread, **result.unrecorded}.items():
        LineReporter(sys.stderr).warn(
            f"the record in {folder} is incomplete, so a controller that still runs may rent again: {why}"
        )
    may_have_controller = unread or any(
        one.damaged or one.controller(state.now) is not None for one in snapshots.values()
    )
    until = time.monotonic() + (LATE_SECONDS if may_have_controller else 0.0)
    deleted, failed = set(result.deleted), dict(result.failed)
    while True:
        resources, errors = list_resources(state.providers)
        remaining = resources_of(name, resources)
        if time.monotonic() >= until:
            break
        late = take_down(removal_targets(remaining), {}, by_name, state.now, LineReporter(sys.stderr))
        deleted, failed = deleted | set(late.deleted), {**failed, **late.failed}
        time.sleep(POLL_SECONDS)
    require_removed(remaining, failed)
    for error in (*errors, state.no_access):
        if error is not None:
            raise error  # what other providers list is deleted
    remains = "nothing of forerun" if name is None else f"nothing of {name}"
    print(f"deleted {_counted(len(deleted), 'resource')}; {remains} remains")
    return 0


def _show(chosen: Sequence[Resource], project: ProjectState) -> None:
    """Print what will be deleted: the table of `forerun ps`, or the plain names if it cannot be shown."""
    from forerun.cli.cloud.show_runs import table
    from forerun.cloud.view.run_rows import rows_of
    from forerun.console import SafeConsole

    if not chosen:
        return
    try:
        console = SafeConsole()
        console.print(table(rows_of(chosen, project.snapshots, project.now), project.now, console.width))
    except Exception as error:  # no defect of the table may keep a machine alive
        LineReporter(sys.stderr).warn(f"the table cannot be shown: {type(error).__name__}: {error}")
        for resource in chosen:
            print(f"{resource.kind} {resource.name} in {resource.zone}")


def _require_one_choice(name: str | None, all: bool) -> None:
    """Raise unless exactly one of a name and --all is given."""
    from forerun.errors import UserError

    if (name is None) == (not all):
        raise UserError(
            "E-CLOUD-068",
            "forerun down needs the name of a run, or --all",
            why="neither is given" if name is None else f"both {name} and --all are given",
            fix="see the names with forerun ps",
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
