"""What the states of nodes and queued resources mean. Pure functions of the API's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.cloud import labels
from forerun.cloud.google.api_error import DEADLINE_EXCEEDED, classify, operation_error
from forerun.cloud.provider import Failure, SliceState, SliceStatus

_CREATING = ("", "STATE_UNSPECIFIED", "CREATING", "STARTING", "UNHIDING")
# The machines come back after these, and they are billed meanwhile. If they do not come back, the hosts do not report.
_INTERRUPTED = ("RESTARTING", "REIMAGING", "REPAIRING")
_WAITING = ("", "STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")


def node_status(node: Mapping[str, Any], *, spot: bool, ready_at: float | None = None) -> SliceStatus:
    """Return the status of a node.

    A preempted node may show another state than PREEMPTED. A spot node that neither runs nor is created is preempted.
    """
    word = str(node.get("state") or "")
    detail = _detail(word, node)
    if word == "READY" or (word in _INTERRUPTED and not spot):
        return SliceStatus(SliceState.READY, detail, ready_at=ready_at)
    if word in _CREATING:
        return SliceStatus(SliceState.CREATING, detail)
    if word == "DELETING":
        return SliceStatus(SliceState.DELETING, detail, ready_at=ready_at)
    if word == "PREEMPTED" or spot:
        return SliceStatus(SliceState.PREEMPTED, detail, ready_at=ready_at)
    return SliceStatus(SliceState.STOPPED, detail, ready_at=ready_at)


def queue_status(
    queued: Mapping[str, Any], node: Mapping[str, Any] | None, *, ready_at: float | None = None
) -> SliceStatus:
    """Return the status of a queued resource and its node."""
    state = queued.get("state") or {}
    word, spot = str(state.get("state") or ""), is_spot(queued)
    if word in _WAITING:
        return SliceStatus(SliceState.WAITING, word)
    if word == "PROVISIONING":
        return SliceStatus(SliceState.CREATING, word)
    if word == "DELETING":
        return SliceStatus(SliceState.DELETING, word, ready_at=ready_at)
    if word == "FAILED":
        return _failed(state)
    if word == "ACTIVE" and node is not None:
        return node_status(node, spot=spot, ready_at=ready_at)
    # SUSPENDING and SUSPENDED: the machines are deleted, by a preemption, at the end of a flex-start period, or by
    # someone who deleted the node. The request is never filled again. ACTIVE without a node comes shortly before.
    lost = SliceState.PREEMPTED if spot else SliceState.STOPPED
    detail = f"{word}, and the node does not exist" if word == "ACTIVE" else word
    return SliceStatus(lost, detail, ready_at=ready_at)


def is_spot(resource: Mapping[str, Any]) -> bool:
    """Return whether a node or a queued resource can be preempted."""
    scheduling = resource.get("schedulingConfig") or {}
    if "spot" in resource or scheduling.get("spot") or scheduling.get("preemptible"):
        return True
    return labels_of(resource).get(labels.CAPACITY) == "spot"


def labels_of(resource: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the labels of a node. A queued resource has none itself; its node does, also before it exists."""
    found = node_of(resource).get("labels") or {}
    return {str(name): str(value) for name, value in found.items()}


def node_of(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node that a queued resource describes, or the resource itself if it is a node."""
    specs = (resource.get("tpu") or {}).get("nodeSpec")
    node: Mapping[str, Any] = (specs[0].get("node") or {}) if specs else resource
    return node


def _failed(state: Mapping[str, Any]) -> SliceStatus:
    error = (state.get("failedData") or {}).get("error")
    if not error:
        return SliceStatus(SliceState.FAILED, "FAILED: the request was not filled in time", Failure.CAPACITY)
    found = operation_error(error)
    # A request that expires in the queue ends with DEADLINE_EXCEEDED: there was no capacity.
    failure = Failure.CAPACITY if found.code == DEADLINE_EXCEEDED else classify(found)
    return SliceStatus(SliceState.FAILED, f"FAILED: {found.message}", failure)


def _detail(word: str, node: Mapping[str, Any]) -> str:
    """Return the state, the health if it is not good, and the newest symptom."""
    health = str(node.get("health") or "")
    parts = [word or "STATE_UNSPECIFIED"]
    if health not in ("", "HEALTHY", "HEALTH_UNSPECIFIED"):
        parts.append(f"{health} {node.get('healthDescription') or ''}".strip())
    symptoms = node.get("symptoms") or ()
    if symptoms:
        parts.append(str(symptoms[-1].get("symptomType") or ""))
    return ", ".join(part for part in parts if part)
