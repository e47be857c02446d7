"""Lists of the Cloud TPU API over all zones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.api_problem import problem
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.tpu.node_request import STABLE, location
from forerun.cloud.tpu.tpu_answers import PAGES


@dataclass(frozen=True)
class Listing:
    """The resources of one kind, and the zones that did not answer."""

    items: Sequence[Mapping[str, Any]]
    unreachable: Sequence[str]


def list_everywhere(rest: Rest, kind: str) -> Listing:
    """Return all resources of a kind. A zone that the list omits is asked once more on its own."""
    items, missing = _list(rest, kind, "-")
    unreachable = []
    for zone in missing:
        try:
            more, still_missing = _list(rest, kind, zone)
        except CloudUnavailable:
            more, still_missing = [], [zone]
        items += more
        unreachable += still_missing
    return Listing(items, unreachable)


def _list(rest: Rest, kind: str, zone: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    items: list[Mapping[str, Any]] = []
    missing: list[str] = []
    try:
        for page in rest.pages("tpu", f"{STABLE}/{location(rest.project, zone)}/{kind}", shape=PAGES[kind]):
            items += page.get(kind) or ()
            missing += [str(name).split("/")[-1] for name in page.get("unreachable") or ()]
    except ApiError as error:
        raise problem(error, rest.project) from error
    return items, missing
