"""Deletion of the resources of runs. Results, checkpoints and records stay in the bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from forerun.cloud import labels
from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.provider import CloudUnavailable, Provider, Resource, SliceState
from forerun.cloud.record.entries import ENDED_FINISHED, ENDED_STOPPED, EndEntry, ReadyEntry, StopEntry
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.project_state import bounded_calls
from forerun.cloud.view.run_location import is_address
from forerun.cloud.view.snapshot import RecordSnapshot
from forerun.errors import UserError
from forerun.reporter import Reporter

REASON = "forerun down"
STOP_SECONDS = 10.0  # how long the buckets may delay the deletions
RECORD_SECONDS = 30.0


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
    folders = folders_of(chosen)
    return {
        folder: snapshot
        for folder, snapshot in snapshots.items()
        if folder in folders or (not snapshot.is_over and _is_named(name, folder, snapshot))
    }


def folders_of(resources: Iterable[Resource]) -> set[str]:
    """Return the bucket folders that the metadata of resources name."""
    return {folder for resource in resources if (folder := resource.metadata.get(labels.FOLDER))}


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
    reporter: Reporter,
    damaged: Collection[str] = (),
) -> RemovalResult:
    """Delete resources, then record the end of their attempts. One that fails does not prevent the others.

    First every run gets a stop request: a controller that still works would else replace the slices. The deletion
    needs no bucket: one that does not answer delays it by at most STOP_SECONDS.

    Args:
      targets: what to delete, in this order.
      snapshots: the records of the runs, by their folder.
      providers: by name.
      now: the time of the cloud's clock.
      reporter: receives a line for each deletion.
      damaged: folders of runs with a damaged `run.json`. They get the stop request only.
    """
    stopped = {folder for folder, record in snapshots.items() if record.finished is None and record.stop is None}
    unrecorded = _written(
        {folder: lambda files: files.request_stop(StopEntry(now, REASON)) for folder in (*stopped, *damaged)},
        STOP_SECONDS,
    )
    # The cloud forgets since when a slice was billed.
    ready = {folder: _ready_times(snapshot, providers, now) for folder, snapshot in snapshots.items()}
    deleted: dict[RemovalTarget, float | None] = {}
    failed: dict[RemovalTarget, str] = {}
    for target in targets:
        reporter.info(f"deleting {target.name} in {target.zone}")
        try:
            deleted[target] = providers[target.provider].delete(target.name, target.zone)
        except (CloudUnavailable, UserError) as error:
            failed[target] = _text(error)
    ends: dict[str, Callable[[RunFiles], None]] = {}
    for folder, snapshot in snapshots.items():
        entries, why = _ends(snapshot, ready[folder], providers, deleted, failed)
        unrecorded |= {folder: why} if why else {}
        new = {number: at for number, at in ready[folder].items() if number not in snapshot.ready}
        ends[folder] = partial(_record_ends, new, entries)
    return RemovalResult(deleted, failed, {**_written(ends, RECORD_SECONDS), **unrecorded})


def _written(writes: Mapping[str, Callable[[RunFiles], None]], seconds: float) -> dict[str, str]:
    """Write to the records of folders. Return why others could not be changed within `seconds`."""

    def write(folder: str) -> str:
        try:
            writes[folder](RunFiles(folder))
        except (UserError, OSError, ValueError) as error:
            return _text(error)
        return ""

    results = bounded_calls(write, writes, seconds)
    problems = {folder: results.get(folder, f"no answer within {seconds:.0f} s") for folder in writes}
    return {folder: why for folder, why in problems.items() if why}


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


def _ready_times(snapshot: RecordSnapshot, providers: Mapping[str, Provider], now: float) -> dict[int, float]:
    """Return since when the open attempts of a run are billed, from the record or the API."""
    times = {number: entry.at for number, entry in snapshot.ready.items()}
    for entry in snapshot.open_attempts:
        provider = providers.get(entry.option.provider)
        if provider is None or entry.number in times:
            continue
        with suppress(CloudUnavailable, UserError):
            status = provider.status(entry.resource, entry.option.zone)
            if status.ready_at is not None or status.state is SliceState.READY:
                times[entry.number] = now if status.ready_at is None else status.ready_at
    return times


def _ends(
    snapshot: RecordSnapshot,
    ready: Mapping[int, float],
    providers: Mapping[str, Provider],
    deleted: Mapping[RemovalTarget, float | None],
    failed: Mapping[RemovalTarget, str],
) -> tuple[dict[int, EndEntry], str]:
    """Return the ends of the open attempts whose deletion is verified, and why another one is not verified."""
    reason = ENDED_STOPPED if snapshot.finished is None else ENDED_FINISHED
    ends, problem = {}, ""
    for entry in snapshot.open_attempts:
        provider = providers.get(entry.option.provider)
        target = RemovalTarget(entry.option.provider, entry.resource, entry.option.zone)
        if provider is None or target in failed:
            continue
        try:
            # One that is not listed may still be on its way.
            ended_at = deleted[target] if target in deleted else provider.delete(entry.resource, entry.option.zone)
            at = provider.now() if ended_at is None else ended_at
        except (CloudUnavailable, UserError) as error:
            problem = _text(error)
            continue
        usd = attempt_usd(entry.option.usd_per_hour, ready.get(entry.number), at, preempted=False)
        ends[entry.number] = EndEntry(at, reason, usd, REASON)
    return ends, problem


def _record_ends(ready: Mapping[int, float], ends: Mapping[int, EndEntry], files: RunFiles) -> None:
    for number, at in ready.items():
        files.create_ready(number, ReadyEntry(at))
    for number, end in ends.items():
        files.create_end(number, end)


def _text(error: BaseException) -> str:
    return error.what if isinstance(error, UserError) else str(error)
