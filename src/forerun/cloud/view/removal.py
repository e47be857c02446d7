"""Deletion of the resources of runs. Results, checkpoints and records stay in the bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.cloud import labels
from forerun.cloud.provider import CloudUnavailable, Provider, Resource
from forerun.errors import UserError


@dataclass(frozen=True)
class RemovalTarget:
    """A slice, a keeper or another resource to delete."""

    provider: str
    name: str
    zone: str


def removal_targets(resources: Iterable[Resource]) -> tuple[RemovalTarget, ...]:
    """Return what to delete, in its order: keepers first, since a keeper would replace a slice that disappears.

    Machines come before resources without machines, which the deletion of the machines may remove too.
    """
    ordered = sorted(
        resources,
        key=lambda one: (one.labels.get(labels.ROLE) != labels.KEEPER_ROLE, not one.slice, one.name, one.zone),
    )
    return tuple(dict.fromkeys(RemovalTarget(one.provider, one.name, one.zone) for one in ordered))


def remove(
    targets: Sequence[RemovalTarget], providers: Mapping[str, Provider], tell: Callable[[RemovalTarget], None]
) -> dict[RemovalTarget, str]:
    """Delete resources. Return why some could not be deleted; the others are still deleted.

    Args:
      providers: by name.
      tell: called before each deletion.
    """
    failed: dict[RemovalTarget, str] = {}
    for target in targets:
        tell(target)
        try:
            providers[target.provider].delete(target.name, target.zone)
        except (CloudUnavailable, UserError) as error:
            failed[target] = error.what if isinstance(error, UserError) else str(error)
    return failed


def require_removed(remaining: Sequence[Resource], failed: Mapping[RemovalTarget, str]) -> None:
    """Raise UserError if something that was to be deleted still exists."""
    if not remaining:
        return
    names = sorted({f"{one.kind} {one.name} in {one.zone}" for one in remaining})
    why = "; ".join(sorted(set(failed.values()))) or "the cloud still lists them after their deletion"
    raise UserError(
        "E-CLOUD-069",
        f"{len(names)} resources still exist: {', '.join(names)}",
        why=why,
        fix="run the same command again; forerun ps shows what exists and what it costs",
    )


def resources_of(name: str, resources: Iterable[Resource], folder: str | None) -> tuple[Resource, ...]:
    """Return the resources of a run: those with its label, and its bucket folder if it is known."""
    label = labels.run_label(name)
    return tuple(
        one
        for one in resources
        if one.labels.get(labels.RUN) == label and (folder is None or one.metadata.get(labels.FOLDER, folder) == folder)
    )
