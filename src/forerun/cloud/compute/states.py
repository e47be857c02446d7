"""The state of a slice, from what Compute Engine reports about its machines. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud.google.api_error import ApiError, classify, operation_error
from forerun.cloud.google.clock import seconds_of
from forerun.cloud.provider import Failure, SliceState, SliceStatus

Answer = Mapping[str, Any]
# Machines of these states do not run, and do not run again without a request.
_GONE = ("STOPPED", "TERMINATED", "SUSPENDED", "SUSPENDING", "REPAIRING")
_ENDING = ("STOPPING", "PENDING_STOP", "DEPROVISIONING")
_PREEMPTION = "compute.instances.preempted"


def last_part(url: object) -> str:
    """Return the last part of a URL: the name of a zone, machine type or instance."""
    return str(url or "").rstrip("/").rpartition("/")[2]


def failure_of(error: ApiError) -> Failure:
    """Return what an error means. A machine type that one zone does not have may exist in another zone."""
    if "does not exist in zone" in error.message:
        return Failure.PERMISSION
    return classify(error)


def is_spot(instance: Answer) -> bool:
    return bool((instance.get("scheduling") or {}).get("provisioningModel") == "SPOT")


def started_at(instance: Answer) -> float | None:
    """Return since when an instance is billed."""
    return seconds_of(instance.get("lastStartTimestamp")) or seconds_of(instance.get("creationTimestamp"))


def instance_status(instance: Answer) -> SliceStatus:
    """Return the state of a slice that consists of one instance."""
    word = str(instance.get("status") or "")
    detail = ": ".join(part for part in (word, str(instance.get("statusMessage") or "")) if part)
    if word == "RUNNING":
        return SliceStatus(SliceState.READY, detail, ready_at=started_at(instance))
    if word == "PENDING":
        return SliceStatus(SliceState.WAITING, detail)
    if word in _ENDING:
        return SliceStatus(SliceState.DELETING, detail)
    if word in _GONE:
        lost = SliceState.PREEMPTED if is_spot(instance) else SliceState.STOPPED
        stopped_at = seconds_of(instance.get("lastStopTimestamp"))
        return SliceStatus(lost, detail, ready_at=started_at(instance), ended_at=stopped_at)
    return SliceStatus(SliceState.CREATING, detail)


def group_status(
    group: Answer,
    managed: Sequence[Answer],
    instances: Sequence[Answer],
    operations: Sequence[Answer],
    hosts: int,
    capacity: str,
) -> SliceStatus:
    """Return the state of a slice that is a managed instance group.

    Args:
      managed: the entries of `listManagedInstances`.
      instances: the instances of the group that exist.
      operations: the operations on these instances, and on instances that no longer exist.
      hosts: the number of machines of the complete slice.
    """
    words = [str(instance.get("status") or "") for instance in instances]
    detail = ", ".join(f"{words.count(word)} of {hosts} {word}" for word in sorted(set(words))) or f"0 of {hosts}"
    if len(words) == hosts and all(word == "RUNNING" for word in words):
        starts = [start for instance in instances if (start := started_at(instance)) is not None]
        return SliceStatus(SliceState.READY, detail, ready_at=min(starts, default=None))
    actions = [str(entry.get("currentAction") or "") for entry in managed]
    if actions and all(action == "DELETING" for action in actions):
        return SliceStatus(SliceState.DELETING, detail)
    # A slice without one of its machines is useless: its chips are connected as one network.
    lost = SliceState.PREEMPTED if capacity == "spot" else SliceState.STOPPED
    if any(word in _GONE + _ENDING for word in words):
        # Machines that still run are billed until the group is deleted, so that there is no end yet.
        return SliceStatus(lost, detail, ready_at=billed_since(operations))
    if failed := _creation_error(managed):
        failure, message = failed
        # On-demand and spot requests fail, so that another zone is tried. The other kinds wait for capacity.
        waits = failure is Failure.CAPACITY and capacity in ("flex-start", "reservation")
        return SliceStatus(SliceState.WAITING if waits else SliceState.FAILED, message, failure)
    is_stable = bool((group.get("status") or {}).get("isStable"))
    if is_stable and len(words) < hosts:
        end = None if words else ended_at(operations)
        return SliceStatus(lost, detail, ready_at=billed_since(operations), ended_at=end)
    if not words and capacity in ("flex-start", "reservation"):
        return SliceStatus(SliceState.WAITING, detail)
    return SliceStatus(SliceState.CREATING, detail)


def absent_status(name: str, operations: Sequence[Answer]) -> SliceStatus:
    """Return the state of a slice whose resource does not exist, from the operations on its name.

    An insertion that fails later leaves no resource: its error is only in the operation. A machine that the cloud took
    or deleted at its limit leaves only operations as well. They tell how long it was billed: without that, a controller
    would take it for a machine that was never created, and rent another one.
    """
    own = [one for one in operations if last_part(one.get("targetLink")) == name]
    instances = [one for one in operations if is_on_instance(one)]
    if pending := pending_insertions(own):
        return SliceStatus(SliceState.CREATING, f"insert {pending[0].get('status')}")
    newest = next(iter(newest_first([one for one in own if one.get("status") == "DONE"])), {})
    kind = str(newest.get("operationType") or "")
    if kind == "insert" and newest.get("error"):
        error = operation_error(newest["error"])
        failed_at = seconds_of(newest.get("endTime"))
        return SliceStatus(SliceState.FAILED, f"{error.reason}: {error.message}", failure_of(error), ended_at=failed_at)
    detail = "preempted" if kind == _PREEMPTION else kind
    return SliceStatus(SliceState.ABSENT, detail, ready_at=billed_since(instances), ended_at=ended_at(instances))


def pending_insertions(operations: Sequence[Answer]) -> list[Answer]:
    """Return the insertions that have not ended, without those whose resource was deleted or taken in the meantime."""
    deleted: dict[str, float] = {}
    for one in operations:
        ends = one.get("operationType") in ("delete", _PREEMPTION)
        if ends and one.get("status") == "DONE" and not one.get("error"):
            target = str(one.get("targetLink"))
            deleted[target] = max(deleted.get(target, 0.0), seconds_of(one.get("insertTime")) or 0.0)
    return [
        one
        for one in operations
        if one.get("operationType") == "insert"
        and one.get("status") != "DONE"
        and deleted.get(str(one.get("targetLink")), -1.0) < (seconds_of(one.get("insertTime")) or 0.0)
    ]


def is_on_instance(operation: Answer) -> bool:
    return "/instances/" in str(operation.get("targetLink"))


def billed_since(operations: Sequence[Answer]) -> float | None:
    """Return when the first machine was created, or None if none was. The end of an insertion is its start."""
    ends = [
        seconds_of(one.get("endTime"))
        for one in operations
        if one.get("operationType") == "insert" and one.get("status") == "DONE" and not one.get("error")
    ]
    return min((end for end in ends if end is not None), default=None)


def ended_at(operations: Sequence[Answer]) -> float | None:
    """Return when the newest operation that is not an insertion was completed, or None."""
    for operation in newest_first(operations):
        kind = str(operation.get("operationType") or "")
        if kind != "insert" and operation.get("status") == "DONE" and not operation.get("error"):
            return seconds_of(operation.get("endTime") or operation.get("insertTime"))
    return None


def newest_first(operations: Sequence[Answer]) -> list[Answer]:
    # Operations of one moment are listed in their order.
    return sorted(operations, key=lambda one: seconds_of(one.get("insertTime")) or 0.0)[::-1]


def _creation_error(managed: Sequence[Answer]) -> tuple[Failure, str] | None:
    """Return the failure and message of the first machine that the group could not create."""
    for entry in managed:
        errors = ((entry.get("lastAttempt") or {}).get("errors") or {}).get("errors")
        if errors:
            error = operation_error({"errors": errors})
            return failure_of(error), f"{error.reason}: {error.message}"
    return None
