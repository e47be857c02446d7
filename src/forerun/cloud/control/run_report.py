"""Texts about a run for the user: its state in one line, its events, and the summary of its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.cloud.control.actions import (
    Action,
    DeliverJob,
    EndAttempt,
    EndRun,
    RecordReady,
    RequestSlice,
    RequestStop,
    StartAttempt,
)
from forerun.cloud.control.run_view import AttemptView, ControlView
from forerun.cloud.provider import SliceState
from forerun.cloud.record.entries import ENDED_PREEMPTED, ENDED_REFUSED, Option
from forerun.cloud.record.run_files import RunFiles


def option_text(option: Option) -> str:
    return f"{option.slice} in {option.zone} ({option.capacity})"


def event_text(action: Action) -> str | None:
    """Return a line about an action that happens once, or None for pauses."""
    match action:
        case StartAttempt(entry):
            limit = "" if entry.limit_seconds is None else f", at most {duration(entry.limit_seconds)}"
            return f"attempt {entry.number}: {option_text(entry.option)}, ${entry.option.usd_per_hour:.2f}/h{limit}"
        case RequestSlice(entry):
            return f"requesting {entry.resource}"
        case RecordReady(entry):
            return f"{entry.resource} is ready, and billed from now on"
        case DeliverJob(entry):
            return f"sending the job to {entry.option.hosts} host{'s' * (entry.option.hosts > 1)}"
        case RequestStop(reason):
            return f"stopping with a checkpoint: {reason}"
        case EndAttempt(entry, reason, detail):
            return f"deleting {entry.resource}: {reason}" + (f" ({detail})" if detail else "")
        case EndRun(reason, detail):
            return f"the run has ended: {reason}" + (f" ({detail})" if detail and detail != reason else "")
        case _:
            return None


def state_text(view: ControlView) -> str:
    """Return the present state of a run in one line."""
    current = view.current
    if current is None:
        return f"waiting for capacity in all zones, ${view.cost_usd:.2f} so far"
    if current.ready is None:
        return _waiting(view, current)
    words = [f"{option_text(current.entry.option)}: {phase_text(view)}"]
    if view.step is not None:
        words.append(f"step {view.step}" + (f" of {view.run.total_steps}" if view.run.total_steps else ""))
    cap = "" if view.run.max_usd is None else f" of ${view.run.max_usd:.2f}"
    words.append(f"${view.cost_usd:.2f}{cap}")
    if view.deadline is not None:
        words.append(f"{duration(view.deadline - view.now)} left")
    return ", ".join(words)


def program_text(view: ControlView) -> str | None:
    """Return whether the compiled program is the planned one, or why not. None: not compiled, or not planned."""
    if view.current is None or 0 not in view.hosts:
        return None
    entry, planned = view.hosts[0].entry, view.current.entry.option.program
    if not entry.program or not planned:
        return None
    if entry.program == planned:
        return f"the hosts compile the planned program {planned}"
    return entry.detail if entry.detail.startswith("program ") else None


def phase_text(view: ControlView) -> str:
    """Return the phase of the hosts, as `training`, or `installing (3 of 4 hosts)`."""
    current = view.current
    count = 0 if current is None else current.entry.option.hosts
    phases = [view.hosts[index].entry.phase if index in view.hosts else "setting up" for index in range(count)]
    if len(set(phases)) <= 1:
        return phases[0] if phases else ""
    return ", ".join(f"{phase} ({phases.count(phase)} of {count} hosts)" for phase in dict.fromkeys(phases))


def _waiting(view: ControlView, current: AttemptView) -> str:
    option = current.entry.option
    waited = duration(view.now - current.entry.created_at)
    state = view.status.state if view.status is not None else SliceState.ABSENT
    what = "creating" if state is SliceState.CREATING else "waiting for capacity:"
    others = [one for one in view.run.options if (one.slice, one.zone) != (option.slice, option.zone)]
    next_ones = ", ".join(f"{one.slice} in {one.zone} at ${one.usd_per_hour:.2f}/h" for one in others[:2])
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return f"{what} {option_text(option)} for {waited}" + (f"; alternatives: {next_ones}{more}" if others else "")


def duration(seconds: float) -> str:
    """Return a time such as `45 s`, `12 min` or `3 h 20 min`."""
    seconds = max(seconds, 0)
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


SUMMARY = "summary.json"


def run_summary(view: ControlView, reason: str) -> dict[str, Any]:
    """Return the summary of a run. Predictions are those of the first option; None where nothing was planned."""
    plan = view.run.options[0]
    attempts = []
    for one in view.attempts:
        billed = 0.0 if one.ready is None or one.end is None else max(one.end.at - one.ready.at, 0.0)
        attempts.append(
            {
                "number": one.entry.number,
                "slice": one.entry.option.slice,
                "zone": one.entry.option.zone,
                "capacity": one.entry.option.capacity,
                "billed_hours": billed / 3600,
                "usd": None if one.end is None else one.end.usd,
                "end": None if one.end is None else one.end.reason,
                "detail": "" if one.end is None else one.end.detail,
            }
        )
    return {
        "run": view.run.name,
        "folder": view.run.folder,
        "end": reason,
        "max_usd": view.run.max_usd,
        "predicted": {
            "hours": plan.hours,
            "usd": None if plan.hours is None else plan.hours * plan.usd_per_hour,
            "preemptions": plan.preemptions,
        },
        "actual": {
            "hours": sum(one["billed_hours"] for one in attempts),
            "usd": view.spent_usd + view.keeper_usd,
            "keeper_usd": view.keeper_usd,
            "preemptions": sum(one["end"] == ENDED_PREEMPTED for one in attempts),
            "refusals": sum(one["end"] == ENDED_REFUSED for one in attempts),
            "elapsed_hours": (view.now - view.run.created_at) / 3600,
        },
        "attempts": attempts,
    }


def write_summary(files: RunFiles, summary: Mapping[str, Any]) -> None:
    """Write the summary beside the record. The last controller's one remains."""
    files.files.replace(SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the summary as lines for the user."""
    predicted, actual = summary["predicted"], summary["actual"]
    rows = [
        ("hours", predicted["hours"], actual["hours"], "{:.2f}"),
        ("cost", predicted["usd"], actual["usd"], "${:.2f}"),
        ("preemptions", predicted["preemptions"], actual["preemptions"], "{:.4g}"),
    ]
    lines = [f"{'':12}{'predicted':>12}{'actual':>12}"]
    for name, before, after, form in rows:
        shown = "-" if before is None else form.format(before)
        lines.append(f"{name:12}{shown:>12}{form.format(after):>12}")
    return lines
