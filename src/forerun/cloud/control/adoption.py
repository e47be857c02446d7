"""Attempts that another process has recorded, as far as this controller accepts them. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from forerun.cloud.control.billing import attempt_limit
from forerun.cloud.labels import resource_name
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option


def place(option: Option) -> tuple[str, str, str, str]:
    """Return what identifies an option: where which slice is rented."""
    return option.provider, option.slice, option.zone, option.capacity


def is_foreign(entry: AttemptEntry, run: CloudRun) -> bool:
    """Return whether the user who agreed to this run did not choose the option of an attempt."""
    return place(entry.option) not in [place(option) for option in run.options]


def adopted(entry: AttemptEntry, run: CloudRun, spent_usd: float, now: float) -> AttemptEntry:
    """Return an attempt of the record with the price, the limit and the name that hold for this run.

    The record may be forged. It can lower the limit. It can neither raise it nor name another resource.

    Args:
      run: what the user has agreed to.
      spent_usd: what earlier attempts and the keeper cost, as far as this controller knows.
    """
    option = next((option for option in run.options if place(option) == place(entry.option)), entry.option)
    spent_usd = max(spent_usd, entry.spent_usd)
    limit = attempt_limit(run, spent_usd, option)
    # Another controller may have rounded differently. All controllers should send the same request.
    if entry.limit_seconds is not None and (limit is None or entry.limit_seconds <= limit + 1):
        limit = entry.limit_seconds
    return AttemptEntry(
        number=entry.number,
        option=option,
        resource=resource_name(run.name, entry.number),
        # Billing that ended before the creation belongs to another slice, so a time in the future would hide a cost.
        created_at=min(entry.created_at, now),
        limit_seconds=limit,
        spent_usd=spent_usd,
    )


def with_lower_cap(run: CloudRun, recorded: CloudRun) -> CloudRun:
    """Return the agreed run with the cap of the record, if that is lower: another laptop may have lowered it."""
    if run.max_usd is None or recorded.max_usd is None or recorded.max_usd >= run.max_usd:
        return run
    return replace(run, max_usd=recorded.max_usd)
