"""`forerun down`: delete the cloud resources of a run, or of all runs. Results stay in the bucket."""

from __future__ import annotations

import argparse
import time

from forerun.cli.cloud.connection import agrees, providers_of, tell

POLL_SECONDS = 2.0
# A request that a controller has sent before it saw the stop may appear in lists only now.
LATE_SECONDS = 10.0


def run(args: argparse.Namespace) -> int:
    from forerun.cli.cloud.ps import table
    from forerun.cloud.view.known_runs import known_runs
    from forerun.cloud.view.project_state import list_resources, read_project
    from forerun.cloud.view.removal import (
        removal_targets,
        require_removed,
        resources_of,
        snapshots_of,
        take_down,
    )
    from forerun.cloud.view.run_location import is_address
    from forerun.cloud.view.run_rows import rows_of
    from forerun.console import SafeConsole

    name = _name(args)
    known = (name, *known_runs()) if name is not None and is_address(name) else known_runs()
    project = read_project(lambda: providers_of(args), known, time.time())
    chosen = resources_of(name, project.resources)
    snapshots = snapshots_of(name, chosen, project.snapshots)
    if not chosen and all(one.is_over for one in snapshots.values()):
        if project.errors:
            raise project.errors[0]
        print("nothing of forerun exists in this project" if name is None else f"{name} has no resources")
        return 0
    targets = removal_targets(chosen)
    if chosen:
        console = SafeConsole()
        console.print(table(rows_of(chosen, project.snapshots, project.now), project.now, console.width))
    tell("checkpoints and results stay in the bucket; forerun stop saves a checkpoint first")
    question = f"delete {_counted(len(targets), 'resource')}?" if targets else "end the runs without resources?"
    if not agrees(question, yes=args.yes):
        print("nothing is deleted")
        return 1
    by_name = {one.name: one for one in project.providers}
    result = take_down(targets, snapshots, by_name, project.now, tell)
    for folder, why in result.unrecorded.items():
        tell(f"warning: {folder} cannot be changed, so a controller that still runs may rent again: {why}")
    has_controller = any(one.controller(project.now) is not None for one in snapshots.values())
    until = time.monotonic() + LATE_SECONDS * has_controller
    deleted, failed = set(result.deleted), dict(result.failed)
    while True:
        found, errors = list_resources(project.providers)
        remaining = resources_of(name, found)
        if time.monotonic() >= until:
            break
        late = take_down(removal_targets(remaining), {}, by_name, project.now, tell)
        deleted, failed = deleted | set(late.deleted), {**failed, **late.failed}
        time.sleep(POLL_SECONDS)
    require_removed(remaining, failed)
    for error in (*errors, project.no_access):
        if error is not None:
            raise error  # what other providers list is deleted
    remains = "nothing of forerun" if name is None else f"nothing of {name}"
    print(f"deleted {_counted(len(deleted), 'resource')}; {remains} remains")
    return 0


def _name(args: argparse.Namespace) -> str | None:
    """Return the run to delete, or None for all."""
    from forerun.errors import UserError

    if (args.name is None) == (not args.all):
        raise UserError(
            "E-CLOUD-068",
            "forerun down needs the name of a run, or --all",
            why="neither is given" if args.name is None else f"both {args.name} and --all are given",
            fix="see the names with forerun ps",
        )
    return None if args.all else str(args.name)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
