"""Google's own client (google-cloud-tpu) as the oracle of names and enums of the Cloud TPU API.

Its messages are generated from the API's protocol buffers. They parse JSON strictly: an unknown field is an error.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from fake import FakeCloud, fields

from forerun.cloud.provider import SliceRequest, SliceState
from forerun.cloud.providers import provider_named
from forerun.cloud.tpu.node_request import create_request
from forerun.cloud.tpu.slice_states import node_status, queue_status

ZONE = "us-east5-b"
# The client lacks these; gcloud has them (tests/cloud/test_gcloud.py).
LACKING = ("provisioningModel", "runDuration", "terminationTimestamp", "diskSizeGb")


@pytest.fixture(scope="module")
def client() -> Any:
    pytest.importorskip("google.cloud.tpu_v2alpha1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from google.cloud import tpu_v2, tpu_v2alpha1
    return {"v2": tpu_v2, "v2alpha1": tpu_v2alpha1}


def request(**changes: Any) -> SliceRequest:
    settings: dict[str, Any] = {
        "name": "forerun-one-1",
        "slice": "v5e-16",
        "zone": ZONE,
        "capacity": "on-demand",
        "labels": {"forerun-run": "one"},
        "metadata": {"forerun-folder": "gs://bucket/one"},
        "request_id": "7d2b6c1e-0000-5000-8000-000000000001",
    }
    return SliceRequest(**settings | changes)


def parse(message: Any, body: Any) -> Any:
    from google.protobuf import json_format

    return json_format.ParseDict(without(body), message.pb(message()))


def without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(one) for key, one in value.items() if key not in LACKING and not key.startswith("@")}
    return [without(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disk_gib": 200, "service_account": "me@p.iam.gserviceaccount.com", "network": "mine", "subnetwork": "part"},
        {"slice": "v5p:4x4x12", "internal_only": True},
        {"capacity": "spot", "wait_seconds": 600},
        {"capacity": "flex-start", "limit_seconds": 3600},
        {"capacity": "reservation", "reservation": "mine"},
    ],
)
def test_requests_have_names_of_the_api(client: Any, changes: dict[str, Any]) -> None:
    wanted = create_request(request(**changes), "p")
    version = wanted.path.split("/")[0]
    kind = "QueuedResource" if wanted.path.endswith("queuedResources") else "Node"
    fields.check(f"tpu/{version}", kind, dict(wanted.body))  # gcloud's messages have all names
    if kind == "Node" or hasattr(client[version], "QueuedResource"):
        parsed = parse(getattr(client[version], kind), wanted.body)
        node = parsed if kind == "Node" else parsed.tpu.node_spec[0].node
        assert dict(node.labels)["forerun-run"] == "one"


def test_every_state_of_a_node_has_a_meaning(client: Any) -> None:
    names = {state.name for version in client.values() for state in version.Node.State} - {"STATE_UNSPECIFIED"}
    found = {name: node_status({"state": name}, spot=True).state for name in names}
    assert found.pop("READY") is SliceState.READY
    assert {name for name, state in found.items() if state is SliceState.READY} == set()
    assert found["PREEMPTED"] is SliceState.PREEMPTED
    assert found["CREATING"] is SliceState.CREATING
    # A preempted node may show another state: none of these means that the machines still come.
    for name in ("STOPPED", "STOPPING", "TERMINATED"):
        assert found[name] in (SliceState.PREEMPTED, SliceState.STOPPED), name


def test_every_state_of_a_queued_resource_has_a_meaning(client: Any) -> None:
    names = {state.name for state in client["v2alpha1"].QueuedResourceState.State} - {"STATE_UNSPECIFIED"}
    found = {name: queue_status({"state": {"state": name}}, None).state for name in names}
    assert found["WAITING_FOR_RESOURCES"] is found["ACCEPTED"] is SliceState.WAITING
    assert found["FAILED"] is SliceState.FAILED
    assert found["SUSPENDED"] in (SliceState.PREEMPTED, SliceState.STOPPED, SliceState.FAILED)
    assert found["DELETING"] is SliceState.DELETING


def test_answers_of_the_fake_are_messages_of_the_api(client: Any) -> None:
    with FakeCloud() as cloud:
        tpu = provider_named("tpu", environment=cloud.environment())
        tpu.create(request())
        tpu.create(request(name="forerun-one-2", capacity="spot"))
        cloud.advance(1)
        cloud.preempt("forerun-one-2")
        cloud.advance(1)
        for one in cloud.resources():
            kind = "Node" if one["kind"] == "node" else "QueuedResource"
            version = "v2" if one["resource"].get("apiVersion") == "V2" else "v2alpha1"
            parsed = parse(getattr(client[version], kind), one["resource"])
            assert parsed.name.endswith(f"/{one['name']}")
        states = {(one["kind"], one["name"]): one["resource"]["state"] for one in cloud.resources()}
    assert states["node", "forerun-one-1"] == "READY"
    assert states["node", "forerun-one-2"] == "PREEMPTED"
