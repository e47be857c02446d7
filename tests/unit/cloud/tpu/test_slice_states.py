"""What each state of the Cloud TPU API means."""

from typing import Any

import pytest

from forerun.cloud.provider import Failure, SliceState
from forerun.cloud.tpu.slice_states import labels_of, node_status, queue_status

# Every state of a node: (on demand, spot).
NODE_STATES = {
    "STATE_UNSPECIFIED": ("creating", "creating"),
    "CREATING": ("creating", "creating"),
    "READY": ("ready", "ready"),
    "RESTARTING": ("ready", "preempted"),
    "REIMAGING": ("ready", "preempted"),
    "DELETING": ("deleting", "deleting"),
    "REPAIRING": ("ready", "preempted"),
    "STOPPED": ("stopped", "preempted"),
    "STOPPING": ("stopped", "preempted"),
    "STARTING": ("creating", "creating"),
    "PREEMPTED": ("preempted", "preempted"),
    "TERMINATED": ("stopped", "preempted"),
    "HIDING": ("stopped", "preempted"),
    "HIDDEN": ("stopped", "preempted"),
    "UNHIDING": ("creating", "creating"),
    "UNKNOWN": ("stopped", "preempted"),
}
QUEUE_STATES = {
    "STATE_UNSPECIFIED": "waiting",
    "CREATING": "waiting",
    "ACCEPTED": "waiting",
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "creating",
    "FAILED": "failed",
    "DELETING": "deleting",
    "ACTIVE": "ready",
    "SUSPENDING": "preempted",
    "SUSPENDED": "preempted",
}
NODE = {"labels": {"forerun-run": "r"}}


def queued(state: str, **values: Any) -> dict[str, Any]:
    return {"tpu": {"nodeSpec": [{"node": NODE}]}, "state": {"state": state}, **values}


def test_the_tables_have_every_state() -> None:
    from google.cloud import tpu_v2

    assert {state.name for state in tpu_v2.Node.State} == set(NODE_STATES)
    assert {state.name for state in tpu_v2.QueuedResourceState.State} == set(QUEUE_STATES)


@pytest.mark.parametrize("state", NODE_STATES)
def test_node(state: str) -> None:
    found = [node_status({"state": state}, spot=spot).state.value for spot in (False, True)]
    assert tuple(found) == NODE_STATES[state]


@pytest.mark.parametrize("state", QUEUE_STATES)
def test_queued_resource(state: str) -> None:
    assert queue_status(queued(state, spot={}), {"state": "READY"}).state.value == QUEUE_STATES[state]


def test_a_preempted_node_decides_before_its_queued_resource_does() -> None:
    assert queue_status(queued("ACTIVE", spot={}), {"state": "STOPPED"}).state is SliceState.PREEMPTED
    assert queue_status(queued("ACTIVE", spot={}), None).state is SliceState.PREEMPTED


def test_the_end_of_flex_start_is_no_preemption() -> None:
    assert queue_status(queued("SUSPENDED"), None).state is SliceState.STOPPED


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ({"code": 8, "message": "There is no more capacity in the zone"}, Failure.CAPACITY),
        ({"code": 8, "message": "Quota limit 'TPUV5P' has been exceeded."}, Failure.QUOTA),
        ({"code": 4, "message": "expired"}, Failure.CAPACITY),
        ({"code": 7, "message": "denied"}, Failure.PERMISSION),
        (None, Failure.CAPACITY),
    ],
)
def test_a_failed_request_says_why(error: Any, failure: Failure) -> None:
    request = queued("FAILED")
    if error:
        request["state"]["failedData"] = {"error": error}
    found = queue_status(request, None)
    assert (found.state, found.failure) == (SliceState.FAILED, failure)
    assert not error or error["message"] in found.detail


def test_the_detail_has_health_and_symptoms() -> None:
    node = {
        "state": "READY",
        "health": "UNHEALTHY_MAINTENANCE",
        "symptoms": [{"symptomType": "LOW_MEMORY"}, {"symptomType": "MESH_BUILD_FAIL"}],
    }
    assert node_status(node, spot=False).detail == "READY, UNHEALTHY_MAINTENANCE, MESH_BUILD_FAIL"


def test_the_labels_of_a_queued_resource_are_those_of_its_node() -> None:
    assert labels_of(queued("WAITING_FOR_RESOURCES")) == labels_of(NODE) == {"forerun-run": "r"}
