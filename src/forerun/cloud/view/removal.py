"""Deletion of the resources of runs. Results, checkpoints and records stay in the bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.cloud import labels
from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.provider import CloudUnavailable, Provider, Resource, SliceState
from forerun.cloud.record.entries import ENDED_FINISHED, ENDED_STOPPED, EndEntry, ReadyEntry, StopEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.run_location import is_address
from forerun.cloud.view.snapshot import RecordSnapshot
from forerun.errors import UserError

REASON = "forerun down"


@dataclass(frozen=True)
class RemovalTarget:
    """A slice, a keeper or another resource to delete."""

    provider: str
    name: str
    zone: str


@dataclass(frozen=True)
class RemovalResult:
    """What a deletion did.

    Attributes:
      deleted: the time at which billing ended, as far as the cloud reports it.
      failed: why a resource could not be deleted.
      unrecorded: why the record of a folder could not be changed.
    """

    deleted: Mapping[RemovalTarget, float | None] = field(default_factory=dict)
    failed: Mapping[RemovalTarget, str] = field(default_factory=dict)
    unrecorded: Mapping[str, str] = field(default_factory=dict)


def resources_of(name: str | None, resources: Iterable[Resource]) -> tuple[Resource, ...]:
    """Return the resources of one run, by its name or the address of its folder, or those of all runs."""
    if name is None:
        return tuple(resources)
    if is_address(name):
        folder = name.rstrip("/")
        return tuple(one for one in resources if one.metadata.get(labels.FOLDER) == folder)
    label = labels.run_label(name)
    return tuple(one for one in resources if one.labels.get(labels.RUN) == label)


def snapshots_of(
    name: str | None, chosen: Sequence[Resource], snapshots: Mapping[str, RecordSnapshot]
) -> dict[str, RecordSnapshot]:
    """Return the records to end: those of the chosen resources, and those of the named run or of all runs."""
    folders = {one.metadata.get(labels.FOLDER, "") for one in chosen}
    return {
        folder: snapshot
        for folder, snapshot in snapshots.items()
        if folder in folders or (not snapshot.is_over and _is_named(name, folder, snapshot))
    }


def removal_targets(resources: Iterable[Resource]) -> tuple[RemovalTarget, ...]:
    """Return what to delete, in its order: keepers first, since a keeper would replace a slice that disappears.

    Machines come before resources without machines, which the deletion of the machines may remove too.
    """
    ordered = sorted(
        resources,
        key=lambda one: (one.labels.get(labels.ROLE) != labels.KEEPER_ROLE, not one.slice, one.name, one.zone),
    )
    return tuple(dict.fromkeys(RemovalTarget(one.provider, one.name, one.zone) for one in ordered))


def take_down(
    targets: Sequence[RemovalTarget],
    snapshots: Mapping[str, RecordSnapshot],
    providers: Mapping[str, Provider],
    now: float,
    tell: Callable[[str], None],
) -> RemovalResult:
    """Delete resources and record the end of their attempts. One that fails does not prevent the others.

    First every run gets a stop request: a controller that still works would else replace the slices.

    Args:
      targets: what to delete, in this order.
      snapshots: the records of the runs, by their folder.
      providers: by name.
      now: the time of the cloud's clock.
      tell: receives a line for each deletion.
    """
    unrecorded: dict[str, str] = {}
    for folder, snapshot in snapshots.items():
        try:
            _request_stop(RunFiles(folder), snapshot, providers, now)
        except (UserError, OSError, CloudUnavailable) as error:
            unrecorded[folder] = _text(error)
    deleted: dict[RemovalTarget, float | None] = {}
    failed: dict[RemovalTarget, str] = {}
    for target in targets:
        tell(f"deleting {target.name} in {target.zone}")
        try:
            deleted[target] = providers[target.provider].delete(target.name, target.zone)
        except (CloudUnavailable, UserError) as error:
            failed[target] = _text(error)
    for folder, snapshot in snapshots.items():
        try:
            _record_ends(RunFiles(folder), snapshot, providers, deleted, failed)
        except (UserError, OSError, CloudUnavailable) as error:
            unrecorded.setdefault(folder, _text(error))
    return RemovalResult(deleted, failed, unrecorded)


def require_removed(remaining: Sequence[Resource], failed: Mapping[RemovalTarget, str]) -> None:
    """Raise UserError if something that was to be deleted still exists."""
    if not remaining:
        return
    names = sorted({f"{one.kind} {one.name} in {one.zone}" for one in remaining})
    raise UserError(
        "E-CLOUD-069",
        f"not deleted: {', '.join(names)}",
        why="; ".join(sorted(set(failed.values()))) or "the cloud still lists them after their deletion",
        fix="run the same command again; forerun ps shows what exists and what it costs",
    )


def _is_named(name: str | None, folder: str, snapshot: RecordSnapshot) -> bool:
    if name is None:
        return True
    if is_address(name):
        return folder == name.rstrip("/")
    return labels.run_label(snapshot.run.name) == labels.run_label(name)


def _request_stop(files: RunFiles, snapshot: RecordSnapshot, providers: Mapping[str, Provider], now: float) -> None:
    """Request the stop of a run, and record since when its slices are billed. The cloud forgets it."""
    if snapshot.finished is None and snapshot.stop is None:
        files.request_stop(StopEntry(now, REASON))
    for entry in snapshot.open_attempts:
        provider = providers.get(entry.option.provider)
        if provider is None or entry.number in snapshot.ready:
            continue
        status = provider.status(entry.resource, entry.option.zone)
        if status.ready_at is not None or status.state is SliceState.READY:
            files.create_ready(entry.number, ReadyEntry(now if status.ready_at is None else status.ready_at))


def _record_ends(
    files: RunFiles,
    snapshot: RecordSnapshot,
    providers: Mapping[str, Provider],
    deleted: Mapping[RemovalTarget, float | None],
    failed: Mapping[RemovalTarget, str],
) -> None:
    reason = ENDED_STOPPED if snapshot.finished is None else ENDED_FINISHED
    for entry in snapshot.open_attempts:
        provider = providers.get(entry.option.provider)
        target = RemovalTarget(entry.option.provider, entry.resource, entry.option.zone)
        if provider is None or target in failed:
            continue
        ended_at = deleted.get(target)
        if target not in deleted:  # not listed: something may still be on its way
            ended_at = provider.delete(entry.resource, entry.option.zone)
        at = provider.now() if ended_at is None else ended_at
        ready = undamaged(files.ready(entry.number))
        usd = attempt_usd(entry.option.usd_per_hour, None if ready is None else ready.at, at, preempted=False)
        files.create_end(entry.number, EndEntry(at, reason, usd, REASON))


def _text(error: BaseException) -> str:
    return error.what if isinstance(error, UserError) else str(error)
