"""Bodies of the requests. The oracle of field names is gcloud's own message classes, if gcloud is installed."""

import json
import pathlib
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from forerun.cloud.compute.bodies import creation_calls, limit_of, read_description
from forerun.cloud.provider import SliceRequest
from forerun.errors import UserError

SDK = pathlib.Path("/usr/lib/google-cloud-sdk/lib")
REQUEST = SliceRequest(
    name="forerun-a-1",
    slice="v6e-16",
    zone="us-east5-a",
    capacity="on-demand",
    labels={"forerun-run": "a", "forerun-attempt": "1", "forerun-role": "slice"},
    metadata={"forerun-folder": "gs://b/a", "startup-script": "#!/bin/sh\n"},
    request_id="1c2b0e9e-0000-4000-8000-000000000000",
    limit_seconds=3600,
)
ONE = replace(REQUEST, slice="v6e-8")


def bodies(request: SliceRequest) -> dict[str, Any]:
    return {call.kind: call.body for call in creation_calls("p", request)}


def scheduling(request: SliceRequest) -> Any:
    return bodies(request)["instance"]["scheduling"]


def test_one_machine_is_an_instance() -> None:
    (call,) = creation_calls("p", ONE)
    assert call.path == "projects/p/zones/us-east5-a/instances"
    assert call.params == {"requestId": REQUEST.request_id}
    assert call.body["name"] == "forerun-a-1"
    assert call.body["machineType"] == "zones/us-east5-a/machineTypes/ct6e-standard-8t"
    assert call.body["labels"] == REQUEST.labels
    assert {one["key"]: one["value"] for one in call.body["metadata"]["items"]} == {
        **REQUEST.metadata,
        "enable-guest-attributes": "TRUE",
    }
    (disk,) = call.body["disks"]
    assert disk["autoDelete"]
    assert disk["boot"]
    assert disk["initializeParams"]["labels"] == REQUEST.labels


def test_several_machines_are_a_group() -> None:
    calls = creation_calls("p", REQUEST)
    assert [call.path for call in calls] == [
        "projects/p/regions/us-east5/resourcePolicies",
        "projects/p/regions/us-east5/instanceTemplates",
        "projects/p/zones/us-east5-a/instanceGroupManagers",
    ]
    policy, template, group = (call.body for call in calls)
    assert {policy["name"], template["name"], group["name"]} == {"forerun-a-1"}
    assert policy["workloadPolicy"] == {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "4x4"}
    assert template["properties"]["machineType"] == "ct6e-standard-4t"
    assert group["targetSize"] == 4
    assert group["targetSizePolicy"] == {"mode": "BULK"}
    assert group["instanceTemplate"] == "projects/p/regions/us-east5/instanceTemplates/forerun-a-1"
    assert group["resourcePolicies"] == {"workloadPolicy": "projects/p/regions/us-east5/resourcePolicies/forerun-a-1"}
    # A group that replaces machines would undo the limit.
    assert group["instanceLifecyclePolicy"] == {"defaultActionOnFailure": "DO_NOTHING"}
    assert template["properties"]["labels"] == REQUEST.labels


def test_kinds_without_labels_describe_their_run() -> None:
    for body in bodies(REQUEST).values():
        found = read_description(body["description"])
        assert found["labels"] == REQUEST.labels
        assert found["metadata"] == {"forerun-folder": "gs://b/a"}
        assert (found["zone"], found["hosts"], found["slice"]) == ("us-east5-a", 4, "v6e-16")
        assert len(body["description"]) <= 2048
    assert read_description("a group of somebody") == {}
    assert read_description("[]") == {}
    assert read_description(None) == {}


def test_a_limit_deletes_the_machine() -> None:
    for capacity in ("on-demand", "spot", "flex-start"):
        found = scheduling(replace(ONE, capacity=capacity))
        assert found["maxRunDuration"] == {"seconds": "3600"}
        assert found["instanceTerminationAction"] == "DELETE"
    assert bodies(REQUEST)["template"]["properties"]["scheduling"]["maxRunDuration"] == {"seconds": "3600"}


def test_provisioning_models() -> None:
    models = {capacity: scheduling(replace(ONE, capacity=capacity)) for capacity in ("on-demand", "spot", "flex-start")}
    assert {key: value["provisioningModel"] for key, value in models.items()} == {
        "on-demand": "STANDARD",
        "spot": "SPOT",
        "flex-start": "FLEX_START",
    }
    for found in models.values():
        assert found["onHostMaintenance"] == "TERMINATE"
        assert found["automaticRestart"] is False


def test_without_a_limit_only_spot_has_an_action() -> None:
    assert "instanceTerminationAction" not in scheduling(replace(ONE, limit_seconds=None))
    assert scheduling(replace(ONE, limit_seconds=None, capacity="spot"))["instanceTerminationAction"] == "DELETE"


def test_limits_that_the_api_accepts() -> None:
    day = 24 * 3600
    assert limit_of(replace(ONE, limit_seconds=5)) == 30
    assert limit_of(replace(ONE, limit_seconds=200 * day)) == 120 * day
    assert limit_of(replace(ONE, limit_seconds=8 * day, capacity="flex-start")) == 7 * day
    assert limit_of(replace(ONE, limit_seconds=None, capacity="flex-start")) == 7 * day
    assert limit_of(replace(ONE, limit_seconds=None)) is None


def test_a_reservation_is_named() -> None:
    found = bodies(replace(ONE, capacity="reservation", reservation="mine"))["instance"]["reservationAffinity"]
    assert found["consumeReservationType"] == "SPECIFIC_RESERVATION"
    assert found["values"] == ["mine"]
    with pytest.raises(UserError) as caught:
        creation_calls("p", replace(ONE, capacity="reservation"))
    assert caught.value.code == "E-CLOUD-021"


def test_a_flex_start_request_may_expire() -> None:
    body = bodies(replace(ONE, capacity="flex-start", wait_seconds=600))["instance"]
    assert body["params"] == {"requestValidForDuration": {"seconds": "600"}}


def test_networks() -> None:
    (default,) = bodies(ONE)["instance"]["networkInterfaces"]
    assert default["network"] == "global/networks/default"
    assert default["accessConfigs"]
    (inner,) = bodies(replace(ONE, internal_only=True, subnetwork="s"))["instance"]["networkInterfaces"]
    assert inner == {"subnetwork": "regions/us-east5/subnetworks/s"}


def test_a_machine_without_accelerator_may_move() -> None:
    found = scheduling(replace(ONE, slice="e2-small"))
    assert found["onHostMaintenance"] == "MIGRATE"
    assert found["automaticRestart"] is True


@pytest.mark.skipif(not SDK.is_dir(), reason="gcloud is not installed")
@pytest.mark.parametrize("capacity", ["on-demand", "spot", "flex-start", "reservation"])
def test_gcloud_knows_every_field(capacity: Any) -> None:
    """Decode each body with gcloud's classes of the beta API, and expect no unknown field or value."""
    request = replace(REQUEST, capacity=capacity, reservation="mine")
    wanted = {**bodies(request), **bodies(replace(request, slice="a3-highgpu-8g"))}
    kinds = {
        "instance": "Instance",
        "template": "InstanceTemplate",
        "policy": "ResourcePolicy",
        "instance group": "InstanceGroupManager",
    }
    program = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/third_party"]
from apitools.base.py import encoding
from googlecloudsdk.generated_clients.apis.compute.beta import compute_beta_messages as messages

def unknown(message, path):
    for name in message.all_unrecognized_fields():
        yield path + "." + name
    for field in message.all_fields():
        value = message.get_assigned_value(field.name)
        for one in value if isinstance(value, list) else [value]:
            if hasattr(one, "all_unrecognized_fields"):
                yield from unknown(one, path + "." + field.name)

for kind, body in json.load(sys.stdin):
    print(*unknown(encoding.DictToMessage(body, getattr(messages, kind)), kind))
"""
    text = json.dumps([(kinds[kind], body) for kind, body in wanted.items()])
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", program, str(SDK)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(re.findall(r"\S+", done.stdout)) == set()
