"""Long-running operations of the Cloud TPU API: their end, their errors, and the newest one of a resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud.google.api_error import ApiError, operation_error
from forerun.cloud.google.rest import Rest
from forerun.cloud.google.timestamps import seconds_of
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.tpu.node_request import STABLE, location
from forerun.cloud.tpu.tpu_answers import Operation, TpuOperationPage

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.5, 5.0
LONGEST_WAIT_SECONDS = 1800.0


class PollPauses:
    """The pauses of one wait: short at first, then at most 5 s, and 30 minutes in total."""

    def __init__(self, rest: Rest, what: str) -> None:
        self._rest, self._what = rest, what
        self._pause, self._waited = FIRST_POLL_SECONDS, 0.0

    def pause(self) -> None:
        if self._waited >= LONGEST_WAIT_SECONDS:
            raise CloudUnavailable(f"{self._what} is not complete after {LONGEST_WAIT_SECONDS / 60:.0f} minutes")
        self._rest.sleep(self._pause)
        self._waited += self._pause
        self._pause = min(self._pause * 1.5, LONGEST_POLL_SECONDS)


def wait_for(rest: Rest, operation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the operation when it has ended. Raise ApiError if it ended with an error."""
    pauses = PollPauses(rest, f"the operation {operation.get('name')}")
    while not operation.get("done"):
        pauses.pause()
        operation = rest.call("GET", "tpu", f"{STABLE}/{operation['name']}", shape=Operation)
    error = error_in(operation)
    if error is not None:
        raise error
    return operation


def error_in(operation: Mapping[str, Any]) -> ApiError | None:
    """Return the error of an operation that has ended, or None."""
    error = operation.get("error")
    return operation_error(error) if error else None


def end_of(operation: Mapping[str, Any] | None) -> float | None:
    """Return when an operation ended without an error, in seconds since 1970."""
    if operation is None or not operation.get("done") or operation.get("error"):
        return None
    return time_of(operation, "endTime")


def operations_on(rest: Rest, zone: str, targets: tuple[str, ...]) -> Sequence[Mapping[str, Any]]:
    """Return the operations on some resources, oldest first. Return none if the account may not list operations."""
    found: list[Mapping[str, Any]] = []
    try:
        for page in rest.pages("tpu", f"{STABLE}/{location(rest.project, zone)}/operations", shape=TpuOperationPage):
            for operation in page.get("operations") or ():
                if target_of(operation) in targets:
                    found.append(operation)
    except ApiError as error:
        if error.status not in (400, 403, 404, 501):
            raise
    return sorted(found, key=lambda operation: time_of(operation, "createTime") or 0.0)


def newest(operations: Sequence[Mapping[str, Any]], *verbs: str) -> Mapping[str, Any] | None:
    chosen = [one for one in operations if verb_of(one) in verbs]
    return chosen[-1] if chosen else None


def verb_of(operation: Mapping[str, Any]) -> str:
    return str((operation.get("metadata") or {}).get("verb") or "")


def time_of(operation: Mapping[str, Any], name: str) -> float | None:
    """Return `createTime` or `endTime` of an operation in seconds since 1970."""
    return seconds_of((operation.get("metadata") or {}).get(name))


def creation_runs(operations: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a creation may still produce a resource: it has not ended, and no later deletion has."""
    created = newest(operations, "create")
    if created is None or created.get("done"):
        return False
    later = operations[operations.index(created) :]
    return not any(verb_of(one) == "delete" and one.get("done") for one in later)


def target_of(operation: Mapping[str, Any]) -> str:
    """Return the resource of an operation, such as `us-east5-b/nodes/forerun-run-1`."""
    # The project may be its name or its number, so only the part after it is compared.
    target = str((operation.get("metadata") or {}).get("target") or "")
    return target.split("/locations/", 1)[-1]
