"""The limits of a run, as `forerun run` prints them before its question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.cloud.provider import Provider
    from forerun.cloud.record.entries import CloudRun

API_NAMES = {"tpu": "the Cloud TPU API", "compute": "Compute Engine"}


def limit_lines(run: CloudRun, providers: Mapping[str, Provider], spent_usd: float) -> list[str]:
    """Return the cap, what is spent of it, and which limits keep it for these machines; no lines without a cap."""
    if run.max_usd is None:
        return []
    spent = f", of which ${spent_usd:.2f} are spent" if spent_usd else ""
    controller = "the keeper" if run.keeper else "this process"
    return [
        f"  cap: ${run.max_usd:.2f} for all attempts together{spent}",
        "  limits that delete the machines within the cap, each without the others:",
        f"    controller: yes, {controller}",
        "    hosts: yes, an agent on each host; until it runs, a watchdog in the startup script",
        f"    cloud API: {_api_text(run, providers)}",
    ]


def _api_text(run: CloudRun, providers: Mapping[str, Provider]) -> str:
    """Return for which machines the API itself has a limit: it depends on the provider and the capacity."""
    from forerun.cloud.control.next_attempt import first_attempt, slice_request

    enforced: dict[tuple[str, str], bool] = {}
    for option in run.options:
        request = slice_request(run, first_attempt(run, option), {})
        kind = f"{API_NAMES.get(option.provider, option.provider)}", option.capacity
        enforced[kind] = enforced.get(kind, True) and providers[option.provider].enforces_limit(request)
    texts = [
        f"yes, {api} deletes them at the deadline" if enforces else f"no, {api} has no limit for {capacity} slices"
        for (api, capacity), enforces in enforced.items()
    ]
    return "; ".join(dict.fromkeys(texts))
