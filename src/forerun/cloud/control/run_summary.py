"""The summary of a run: predicted and actual hours, cost and preemptions. `cloud/summary.json`, and its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.cloud.control.run_view import ControlView
from forerun.cloud.record.entries import ENDED_PREEMPTED, ENDED_REFUSED
from forerun.cloud.record.run_files import RunFiles

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
