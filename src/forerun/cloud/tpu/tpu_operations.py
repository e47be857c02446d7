"""Long-running operations of the Cloud TPU API: their end, their errors, and the newest one of a resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud.google.answer_shape import Operation, TpuOperationPage
from forerun.cloud.google.api_error import ApiError, operation_error
from forerun.cloud.google.clock import seconds_of
from forerun.cloud.google.rest import PollPauses, Rest
from forerun.cloud.tpu.node_request import STABLE, location


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
