"""The choice of the next attempt: which option, after which pause, with which limit; and the request for its slice."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from forerun.cloud import labels
from forerun.cloud.control.actions import EndRun, Pause, StartAttempt
from forerun.cloud.control.billing import attempt_limit, is_useful
from forerun.cloud.control.observation import place
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.labels import resource_name
from forerun.cloud.provider import Failure, SliceRequest
from forerun.cloud.record.entries import (
    ENDED_BROKEN,
    ENDED_BUDGET,
    ENDED_FAILED,
    ENDED_REFUSED,
    AttemptEntry,
    CloudRun,
    EndEntry,
    Option,
)

WAIT_SECONDS = 600.0  # in the queue of one option, if there are other options
MOST_BROKEN = 3  # machines in sequence on which the job did not start
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 600.0
FINAL = {Failure.PERMISSION.value, Failure.INVALID.value}  # the same request fails again
WITHOUT_HOPE = FINAL | {Failure.QUOTA.value}  # if all options fail like this, waiting does not help


def next_attempt(view: ControlView) -> StartAttempt | Pause | EndRun:
    """Return the start of the next attempt, a pause before it, or the end of the run.

    After a preemption, the same option is tried first. After a refusal, the next option is tried. When all options
    were refused, the controller pauses before it begins again with the first one.
    """
    recent = [(entry, end) for entry, end in view.ended if entry.created_at >= view.since]
    if recent and recent[-1][1].reason == ENDED_BUDGET:
        return EndRun(ENDED_BUDGET, _spending(view))
    broken = list(takewhile(lambda one: one[1].reason == ENDED_BROKEN, reversed(recent)))
    if len(broken) >= MOST_BROKEN:
        return EndRun(ENDED_FAILED, f"{len(broken)} machines in sequence did not work: {broken[0][1].detail}")
    refused = list(takewhile(lambda one: one[1].reason == ENDED_REFUSED, reversed(recent)))
    allowed = _allowed(view, refused)
    if not allowed:
        return EndRun(ENDED_FAILED, _refusals(refused))
    places = [place(option) for option in allowed]
    passing = [one for one in refused if place(one[0].option) in places]
    cycles, position = divmod(len(passing), len(allowed))
    if passing and position == 0:
        if all(end.failure in WITHOUT_HOPE for _, end in passing[: len(allowed)]):
            return EndRun(ENDED_FAILED, _refusals(refused[: len(view.run.options)]))
        until = refused[0][1].at + min(FIRST_PAUSE_SECONDS * 2 ** min(cycles - 1, 10), LONGEST_PAUSE_SECONDS)
        if view.now < until:
            return Pause("no option has capacity", until)
    option = _option(view, allowed, refused)
    spent = view.spent_usd + view.keeper_usd
    limit = attempt_limit(view.run, spent, option)
    if not is_useful(limit):
        return EndRun(ENDED_BUDGET, _spending(view))
    number = max((*(one.entry.number for one in view.attempts), *view.unknown_usd), default=0) + 1
    return StartAttempt(AttemptEntry(number, option, resource_name(view.run.name, number), view.now, limit, spent))


def first_attempt(run: CloudRun, option: Option | None = None) -> AttemptEntry:
    """Return the first attempt of a run with an option, by default the first one, for a dry run."""
    option = option or run.options[0]
    limit = attempt_limit(run, 0.0, option)
    return AttemptEntry(1, option, resource_name(run.name, 1), 0.0, limit, 0.0)


def _allowed(view: ControlView, refused: list[tuple[AttemptEntry, EndEntry]]) -> list[Option]:
    """Return the options without those that would fail again."""
    final = [place(entry.option) for entry, end in refused if end.failure in FINAL]
    return [option for option in view.run.options if place(option) not in final]


def _option(view: ControlView, allowed: list[Option], refused: list[tuple[AttemptEntry, EndEntry]]) -> Option:
    places = [place(option) for option in allowed]
    if refused:
        last = place(refused[0][0].option)
        order = [place(option) for option in view.run.options]
        after = order[order.index(last) + 1 :] + order if last in order else order
        return allowed[places.index(next(one for one in after if one in places))]
    if view.ended and (last := place(view.ended[-1][0].option)) in places:
        return allowed[places.index(last)]
    return allowed[0]


def _spending(view: ControlView) -> str:
    return f"${view.cost_usd:.2f} of ${view.run.max_usd or 0.0:.2f} are spent"


def _refusals(refused: list[tuple[AttemptEntry, EndEntry]]) -> str:
    return "; ".join(f"{entry.option.slice} in {entry.option.zone}: {end.detail}" for entry, end in reversed(refused))


SLACK_SECONDS = 60  # the controller gives up before the queue does


def slice_request(run: CloudRun, attempt: AttemptEntry, metadata: Mapping[str, str]) -> SliceRequest:
    """Return the request for the slice of an attempt. Its labels and metadata identify the run without local files."""
    wait = run.wait_seconds or (int(WAIT_SECONDS) if len(run.options) > 1 else None)
    shown = {
        labels.FOLDER: run.folder,
        labels.USD_PER_HOUR: f"{attempt.option.usd_per_hour:.6g}",
        labels.MAX_USD: "" if run.max_usd is None else f"{run.max_usd:.6g}",
    }
    return SliceRequest(
        name=attempt.resource,
        slice=attempt.option.slice,
        zone=attempt.option.zone,
        capacity=attempt.option.capacity,
        labels=labels.slice_labels(run.name, attempt.number),
        metadata={**{key: value for key, value in shown.items() if value}, **metadata},
        request_id=labels.request_id(run.folder, attempt.number, "create"),
        limit_seconds=attempt.limit_seconds,
        wait_seconds=None if wait is None else wait + SLACK_SECONDS,
        disk_gib=run.disk_gib,
        image=run.image,
        network=run.network,
        subnetwork=run.subnetwork,
        service_account=run.service_account,
        reservation=run.reservation,
        internal_only=run.internal_only,
    )
