"""The providers of a project, for commands that only show or delete what exists."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.cloud.provider import Provider
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.view.snapshot import RecordSnapshot


def providers_of(project: str | None) -> tuple[Provider, ...]:
    """Return the providers of the project that the options name."""
    from forerun.cloud.providers import all_providers

    return tuple(all_providers(project))


def providers_of_run(project: str | None, snapshot: RecordSnapshot) -> dict[str, Provider]:
    """Return the providers that a run uses, by name. A run on existing machines needs no credentials of a cloud."""
    from forerun.cloud.providers import provider_named

    options = [*snapshot.run.options, *(entry.option for entry in snapshot.attempts.values())]
    return {name: provider_named(name, project) for name in dict.fromkeys(one.provider for one in options)}


def files_of(name: str, project: str | None) -> RunFiles:
    """Return the record of the run that the user names, by its name or by its address."""
    from forerun.cloud.view.run_location import find_run

    return find_run(name, lambda: providers_of(project))


def agrees(question: str, *, yes: bool) -> bool:
    """Return whether the user agrees. Without a terminal, only `--yes` agrees."""
    from forerun.errors import UserError

    if yes:
        return True
    if not sys.stdin.isatty():
        raise UserError(
            "E-CLOUD-070",
            f"{question} needs an answer",
            why="the input is not a terminal",
            fix="add --yes",
        )
    return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")
