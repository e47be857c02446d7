"""The rows of `forerun ps`: what exists in the cloud, what it costs, and what its run does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.cloud import labels
from forerun.cloud.control.decide import SILENT_SECONDS
from forerun.cloud.provider import Resource, SliceState
from forerun.cloud.record import entries
from forerun.cloud.view.snapshot import RecordSnapshot

# The most advanced phases come last: a run is as far as its slowest host.
_PHASES = (
    entries.INSTALLING,
    entries.CHECKING,
    entries.STARTING,
    entries.TRAINING,
    entries.EXPORTING,
    entries.FINISHED,
    entries.STOPPING,
    entries.STOPPED,
)
_URGENT = (entries.BROKEN, entries.PREEMPTING, entries.STOPPING)  # one host in this phase decides
_ENDS = {entries.ENDED_BUDGET: "stopped at its cap"}
DAMAGED = "damaged record"
MOST_USD = 1e9
_BILLED = (SliceState.READY, SliceState.STOPPED)


@dataclass(frozen=True)
class CloudRow:
    """One slice, keeper or other resource of a run.

    Attributes:
      run: the name of the run; that of its label if its record cannot be read.
      folder: the bucket folder of the run, or an empty string if it is not known.
      kind: `slice`, `keeper`, or the cloud's word for a resource without machines.
      resource: the name of the resource in its zone.
      state: what the machines or their hosts do.
      step: the newest step of the run; None before the first report.
      usd: what the run has cost so far, with earlier slices; None if it is not known.
      max_usd: the cap of the run; None without a cap, or if it is not known.
      usd_per_hour: the price of this resource, or None if it is not known.
      deadline: when the resource is deleted at the latest, in seconds since 1970; None if that is not known.
      costs_money: whether it is billed, or is billed as soon as it is ready.
    """

    run: str
    folder: str
    kind: str
    provider: str
    resource: str
    zone: str
    slice: str
    capacity: str
    state: str
    detail: str = ""
    step: int | None = None
    total_steps: int | None = None
    usd: float | None = None
    max_usd: float | None = None
    usd_per_hour: float | None = None
    is_billed: bool = False
    deadline: float | None = None
    costs_money: bool = True


def rows_of(resources: Iterable[Resource], snapshots: Mapping[str, RecordSnapshot], now: float) -> tuple[CloudRow, ...]:
    """Return one row for each slice, keeper and other resource, in the order of runs and attempts.

    Args:
      resources: everything that the providers list.
      snapshots: the records of runs by their bucket folder. A folder that cannot be read is absent.
    """
    groups: dict[tuple[str, ...], list[Resource]] = {}
    for one in resources:
        groups.setdefault(_slice_key(one), []).append(one)
    rows = [_row(group, snapshots, now) for group in groups.values()]
    return tuple(sorted(rows, key=lambda row: (row.run, row.kind != "slice", row.resource, row.zone)))


def runs_without_resources(
    rows: Sequence[CloudRow], snapshots: Mapping[str, RecordSnapshot], *, ended: bool
) -> tuple[RecordSnapshot, ...]:
    """Return the records of runs that no row shows: those that wait for a slice, and with `ended` also ended ones."""
    shown = {row.folder for row in rows}
    return tuple(
        snapshot for folder, snapshot in snapshots.items() if folder not in shown and (ended or not snapshot.is_over)
    )


def state_of_run(snapshot: RecordSnapshot, now: float) -> str:
    """Return what a run without any resource does."""
    if snapshot.damaged:
        return DAMAGED
    if (reason := snapshot.end_reason) is not None:
        detail = snapshot.ends[max(snapshot.ends)].detail if snapshot.ends and reason == entries.ENDED_FAILED else ""
        return f"{_ENDS.get(reason, reason)}: {detail}" if detail else _ENDS.get(reason, reason)
    if (holder := snapshot.controller(now)) is not None:
        return f"waits for a slice; controller: {holder}"
    return "has no slice and no controller; the command forerun run of its job resumes it"


def host_phase(snapshot: RecordSnapshot) -> str:
    """Return the phase of a slice: that of a host in trouble, else that of its slowest host."""
    phases = {host.phase for host in snapshot.hosts.values()}
    newest = snapshot.newest
    if not phases or newest is None:
        return entries.INSTALLING
    for phase in _URGENT:
        if phase in phases:
            return phase
    if len(snapshot.hosts) < newest.option.hosts:
        return entries.INSTALLING
    known = [phase for phase in _PHASES if phase in phases]
    return known[0] if known else sorted(phases)[0]


def _slice_key(resource: Resource) -> tuple[str, ...]:
    """Return what all resources of one slice share. A resource without labels is shown alone."""
    found = resource.labels
    if labels.RUN not in found:
        return resource.provider, resource.kind, resource.name, resource.zone
    role = found.get(labels.ROLE, labels.SLICE_ROLE)
    folder = resource.metadata.get(labels.FOLDER, "") if role == labels.KEEPER_ROLE else ""
    return resource.provider, found[labels.RUN], found.get(labels.ATTEMPT, ""), role, folder


def _row(group: Sequence[Resource], snapshots: Mapping[str, RecordSnapshot], now: float) -> CloudRow:
    main = max(group, key=lambda one: (bool(one.slice), one.costs_money, one.status.state in _BILLED))
    metadata = {name: value for one in group for name, value in one.metadata.items()}
    folder = metadata.get(labels.FOLDER, "")
    snapshot = snapshots.get(folder)
    role = main.labels.get(labels.ROLE, labels.SLICE_ROLE)
    is_keeper, is_slice = role == labels.KEEPER_ROLE, bool(main.slice) and role == labels.SLICE_ROLE
    attempt = _number(main.labels.get(labels.ATTEMPT))
    price, cap = _amount(metadata.get(labels.USD_PER_HOUR)), _amount(metadata.get(labels.MAX_USD))
    usd = _usd_without_record(main, price, now)
    state, deadline = main.status.state.value, None
    if snapshot is not None:
        usd, cap = snapshot.usd(now), snapshot.run.max_usd
        entry = None if attempt is None or is_keeper else snapshot.attempts.get(attempt)
        if entry is not None:
            price, deadline = entry.option.usd_per_hour, snapshot.deadline(entry.number)
            if entry is snapshot.newest:
                state = _state(main.status.state, snapshot, now)
        if snapshot.damaged and main.status.state is SliceState.READY:
            state = DAMAGED
    return CloudRow(
        run=snapshot.run.name if snapshot and _has_label(snapshot, main) else main.labels.get(labels.RUN, "?"),
        folder=folder,
        kind="keeper" if is_keeper else "slice" if is_slice else main.kind,
        provider=main.provider,
        resource=main.name,
        zone=main.zone,
        slice=main.slice,
        capacity=main.capacity,
        state=state,
        detail=main.status.detail,
        step=snapshot.step if snapshot and not is_keeper else None,
        total_steps=snapshot.run.total_steps if snapshot else None,
        usd=usd,
        max_usd=cap,
        usd_per_hour=price,
        is_billed=main.costs_money and main.status.state in _BILLED,
        deadline=deadline,
        costs_money=any(one.costs_money for one in group),
    )


def _has_label(snapshot: RecordSnapshot, resource: Resource) -> bool:
    """Return whether a record names the run of a resource. A forged name must not hide the run."""
    return resource.labels.get(labels.RUN) in (None, labels.run_label(snapshot.run.name))


def _state(state: SliceState, snapshot: RecordSnapshot, now: float) -> str:
    if state is not SliceState.READY:
        return state.value
    age = snapshot.report_age_seconds(now)
    if age is not None and age > SILENT_SECONDS:
        return "no report"
    return host_phase(snapshot)


def _usd_without_record(resource: Resource, usd_per_hour: float | None, now: float) -> float | None:
    since = resource.status.ready_at or resource.created_at
    if resource.status.state in (SliceState.WAITING, SliceState.CREATING):
        return 0.0
    return None if usd_per_hour is None or since is None else usd_per_hour * max(0.0, now - since) / 3600


def _amount(text: str | None) -> float | None:
    """Return a price or cap in metadata, or None if it is not a finite amount."""
    try:
        amount = float(text or "")
    except ValueError:
        return None
    return amount if 0 <= amount <= MOST_USD else None


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= 4
    return int(text) if text is not None and is_number else None
