"""The fake cloud itself: states, capacity, quota, limits, repeated requests, faults and the bill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
from fake import FakeCloud, Fault, fields
from fake.faults import MALFORMED

ZONE = "us-east5-b"
NODE = {"acceleratorType": "v6e-16", "runtimeVersion": "v2-alpha-tpuv6e", "labels": {"forerun-run": "one"}}
USD_PER_HOUR = 16 * 2.7  # 16 chips on demand in that zone, by prices.csv
SPOT_USD_PER_HOUR = 16 * 1.5437
INSTANCE = {
    "name": "one",
    "machineType": f"zones/{ZONE}/machineTypes/ct6e-standard-8t",
    "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "100"}}],
    "networkInterfaces": [{"accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
    "scheduling": {"onHostMaintenance": "TERMINATE"},
    "labels": {"forerun-run": "one"},
}


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as running:
        yield running


class Api:
    """Sends requests and returns (status, JSON)."""

    def __init__(self, cloud: FakeCloud, version: str = "v2", zone: str = ZONE) -> None:
        self.tpu = f"{cloud.url}/{version}/projects/p/locations/{zone}"
        self.root = f"{cloud.url}/compute/v1/projects/p"
        self.compute = f"{self.root}/zones/{zone}"

    def send(self, method: str, url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def get(self, url: str) -> dict[str, Any]:
        status, found = self.send("GET", url)
        assert status == 200, found
        return found

    def create_node(self, name: str = "one", **changes: Any) -> tuple[int, dict[str, Any]]:
        return self.send("POST", f"{self.tpu}/nodes?nodeId={name}", NODE | changes)

    def create_queued(self, name: str = "one", **changes: Any) -> tuple[int, dict[str, Any]]:
        spec = {"parent": "projects/p/locations/z", "nodeId": name, "node": NODE}
        body = {"tpu": {"nodeSpec": [spec]}} | changes
        return self.send("POST", f"{self.tpu}/queuedResources?queuedResourceId={name}", body)

    def queue_state(self, name: str = "one") -> str:
        return str(self.get(f"{self.tpu}/queuedResources/{name}")["state"]["state"])


def test_node_is_created_billed_and_deleted(cloud: FakeCloud) -> None:
    api = Api(cloud)
    status, operation = api.create_node()
    assert (status, operation["done"]) == (200, False)
    cloud.advance(0)
    node = api.get(f"{api.tpu}/nodes/one")
    assert (node["state"], node["health"], len(node["networkEndpoints"])) == ("READY", "HEALTHY", 4)
    assert "accessConfig" not in node["networkEndpoints"][0]  # external addresses must be asked for
    cloud.advance(1800)
    assert cloud.bill() == {"one": pytest.approx(USD_PER_HOUR / 2)}
    _, deletion = api.send("DELETE", f"{api.tpu}/nodes/one")
    cloud.advance(3600)
    done = api.get(f"{api.tpu.split('/projects')[0]}/{deletion['name']}")
    assert done["metadata"]["endTime"] == "2026-11-18T12:30:00.000000Z"
    assert cloud.bill() == {"one": pytest.approx(USD_PER_HOUR / 2)}
    assert cloud.resources() == []


def test_creation_takes_time_and_is_not_billed() -> None:
    with FakeCloud(create_seconds=100, delete_seconds=50) as cloud:
        api = Api(cloud)
        api.create_node()
        cloud.advance(99)
        assert api.get(f"{api.tpu}/nodes/one")["state"] == "CREATING"
        assert cloud.bill() == {}
        cloud.advance(1)
        assert api.get(f"{api.tpu}/nodes/one")["state"] == "READY"
        api.send("DELETE", f"{api.tpu}/nodes/one")
        assert api.get(f"{api.tpu}/nodes/one")["state"] == "DELETING"
        cloud.advance(1000)
        assert cloud.bill() == {"one": pytest.approx(USD_PER_HOUR * 50 / 3600)}


@pytest.mark.parametrize(("seconds", "usd"), [(59, 0.0), (61, SPOT_USD_PER_HOUR * 61 / 3600)])
def test_preempted_node_keeps_its_name_and_costs_nothing_in_its_first_minute(
    cloud: FakeCloud, seconds: float, usd: float
) -> None:
    api = Api(cloud)
    api.create_node(schedulingConfig={"spot": True})
    cloud.advance(seconds)
    cloud.preempt("one")
    cloud.advance(600)
    assert api.get(f"{api.tpu}/nodes/one")["state"] == "PREEMPTED"
    assert cloud.bill() == {"one": pytest.approx(usd)}
    assert api.create_node()[0] == 409


def test_no_capacity_is_an_error_inside_the_operation(cloud: FakeCloud) -> None:
    api = Api(cloud)
    cloud.set_capacity(ZONE, "v6e-16", 0)
    status, operation = api.create_node()
    assert status == 200
    done = api.get(f"{cloud.url}/v2/{operation['name']}")
    assert (done["done"], done["error"]["code"]) == (True, 8)
    assert cloud.resources() == []


def test_quota_is_used_by_preempted_nodes_and_suspended_requests(cloud: FakeCloud) -> None:
    api = Api(cloud)
    cloud.set_quota(ZONE, "v6e", 32, spot=True)
    api.create_node("one", schedulingConfig={"spot": True})
    api.create_queued("two", spot={})
    cloud.advance(1)
    cloud.preempt("one")
    cloud.preempt("two")
    cloud.advance(1)
    assert (api.get(f"{api.tpu}/nodes/one")["state"], api.queue_state("two")) == ("PREEMPTED", "SUSPENDED")
    status, answer = api.create_node("three", schedulingConfig={"spot": True})
    assert (status, answer["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI'" in answer["error"]["message"]
    api.send("DELETE", f"{api.tpu}/nodes/one")
    cloud.advance(1)
    assert api.create_node("three", schedulingConfig={"spot": True})[0] == 200


def test_queued_resource_waits_becomes_active_and_is_deleted_by_force(cloud: FakeCloud) -> None:
    api = Api(cloud, "v2alpha1")
    cloud.set_capacity(ZONE, "v6e-16", 0)
    api.create_queued(spot={})
    cloud.advance(3600)
    assert (api.queue_state(), cloud.bill()) == ("WAITING_FOR_RESOURCES", {})
    cloud.set_capacity(ZONE, "v6e-16", 1)
    cloud.advance(1)
    assert (api.queue_state(), api.get(f"{api.tpu}/nodes/one")["state"]) == ("ACTIVE", "READY")
    status, answer = api.send("DELETE", f"{api.tpu}/queuedResources/one")
    assert (status, answer["error"]["status"]) == (400, "FAILED_PRECONDITION")
    assert api.send("DELETE", f"{api.tpu}/queuedResources/one?force=true")[0] == 200
    cloud.advance(1)
    assert cloud.resources() == []


def test_queued_resource_expires(cloud: FakeCloud) -> None:
    api = Api(cloud)
    cloud.set_capacity(ZONE, "v6e-16", 0)
    api.create_queued(queueingPolicy={"validUntilDuration": "600s"})
    cloud.advance(601)
    assert api.queue_state() == "FAILED"


def test_flex_start_ends_after_its_duration(cloud: FakeCloud) -> None:
    api = Api(cloud, "v2alpha1")
    status, answer = api.create_queued(provisioningModel="FLEX_START")
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    api.create_queued(provisioningModel="FLEX_START", runDuration={"maxRunDuration": "600s"})
    cloud.advance(10_000)
    assert api.queue_state() == "SUSPENDED"
    assert cloud.bill() == {"one": pytest.approx(SPOT_USD_PER_HOUR / 6)}


def test_repeated_request_creates_one_resource(cloud: FakeCloud) -> None:
    api = Api(cloud, "v2alpha1")
    url = f"{api.tpu}/nodes?nodeId=one&requestId=3f1b"
    first, second = api.send("POST", url, NODE), api.send("POST", url, NODE)
    assert first[0] == second[0] == 200
    assert first[1]["name"] == second[1]["name"]
    assert api.send("POST", url.replace("3f1b", "9a7c"), NODE)[0] == 409


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"acceleratorType": "v6e-17"}, 400),
        ({"acceleratorType": "tpu7x-2x2x1"}, 400),
        ({"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}, 403),  # not offered in this zone
        ({"runtimeVersion": "v2-alpha-tpuv9"}, 400),
        ({"labels": {"Forerun": "one"}}, 400),
        ({"provisioningModel": "SPOT"}, 400),  # a field of queued resources only
        ({"schedulingConfig": {"spott": True}}, 400),
    ],
)
def test_invalid_nodes_are_refused(cloud: FakeCloud, changes: dict[str, Any], status: int) -> None:
    assert Api(cloud).create_node(**changes)[0] == status


def test_instance_with_a_limit_is_deleted_by_the_api(cloud: FakeCloud) -> None:
    api = Api(cloud)
    limit = {"maxRunDuration": {"seconds": "1800"}, "instanceTerminationAction": "DELETE", "provisioningModel": "SPOT"}
    body = INSTANCE | {"scheduling": {"onHostMaintenance": "TERMINATE"} | limit}
    assert api.send("POST", f"{api.compute}/instances?requestId=a", body)[0] == 200
    cloud.advance(1799)
    assert api.get(f"{api.compute}/instances/one")["status"] == "RUNNING"
    assert {one["kind"] for one in cloud.resources()} == {"instance", "disk"}
    cloud.advance(3600)
    assert cloud.resources() == []
    assert cloud.bill() == {"one": pytest.approx(8 * 1.5437 / 2)}


def test_stopped_instance_keeps_its_disk(cloud: FakeCloud) -> None:
    api = Api(cloud)
    body = INSTANCE | {"disks": [{"boot": True, "autoDelete": False, "initializeParams": {}}]}
    api.send("POST", f"{api.compute}/instances", body)
    cloud.advance(60)
    api.send("DELETE", f"{api.compute}/instances/one")
    cloud.advance(1)
    assert [(one["kind"], one["name"]) for one in cloud.resources()] == [("disk", "one")]


@pytest.mark.parametrize("repair", [True, False])
def test_group_of_a_slice_repairs_itself_unless_its_policy_says_otherwise(cloud: FakeCloud, repair: bool) -> None:
    api = Api(cloud)
    create_group(api, "DO_NOTHING" if not repair else "REPAIR")
    cloud.advance(1)
    instances = api.get(f"{api.compute}/instances")["items"]
    assert [one["status"] for one in instances] == ["RUNNING"] * 4
    cloud.advance(3599)
    cloud.preempt("group")
    cloud.advance(3600)
    names = [one["name"] for one in cloud.resources() if one["kind"] == "instance"]
    assert len(names) == (4 if repair else 0)
    assert cloud.bill()["group"] == pytest.approx(SPOT_USD_PER_HOUR * (2 if repair else 1), rel=1e-3)


def test_template_and_policy_of_a_group_cannot_be_deleted(cloud: FakeCloud) -> None:
    api = Api(cloud)
    create_group(api, "DO_NOTHING")
    cloud.advance(1)
    policy, template = (
        f"{api.root}/regions/us-east5/resourcePolicies/policy",
        f"{api.root}/global/instanceTemplates/shape",
    )
    assert {api.send("DELETE", url)[0] for url in (policy, template)} == {400}
    api.send("DELETE", f"{api.compute}/instanceGroupManagers/group")
    cloud.advance(1)
    assert {api.send("DELETE", url)[0] for url in (policy, template)} == {200}
    assert cloud.resources() == []


def create_group(api: Api, action: str) -> None:
    policy = {"name": "policy", "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "4x4"}}
    spot = {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE", "onHostMaintenance": "TERMINATE"}
    properties = {key: INSTANCE[key] for key in ("disks", "networkInterfaces", "labels")}
    properties |= {"machineType": "ct6e-standard-4t", "scheduling": spot}
    group = {
        "name": "group",
        "targetSize": 4,
        "instanceTemplate": "global/instanceTemplates/shape",
        "resourcePolicies": {"workloadPolicy": "projects/p/regions/us-east5/resourcePolicies/policy"},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": action},
    }
    assert api.send("POST", f"{api.root}/regions/us-east5/resourcePolicies", policy)[0] == 200
    template = {"name": "shape", "properties": properties}
    assert api.send("POST", f"{api.root}/global/instanceTemplates", template)[0] == 200
    assert api.send("POST", f"{api.compute}/instanceGroupManagers", group)[0] == 200


def test_faults_are_injected_in_order(cloud: FakeCloud) -> None:
    api = Api(cloud)
    cloud.inject(Fault("error", method="POST", path="/nodes", http=503))
    cloud.inject(Fault("error", method="POST", path="/nodes", http=429))
    cloud.inject(Fault("lost", method="POST", path="/nodes"))
    assert [api.create_node()[0], api.create_node()[0]] == [503, 429]
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        api.create_node()
    assert [one["name"] for one in cloud.resources()] == ["one"]
    cloud.inject(Fault("duplicate", method="DELETE"))
    api.send("DELETE", f"{api.tpu}/nodes/one")
    cloud.advance(1)
    assert cloud.resources() == []
    assert [one["status"] for one in cloud.requests() if one["method"] == "POST"] == [503, 429, 200]


@pytest.mark.parametrize("body", sorted(MALFORMED))
def test_a_malformed_answer_hides_what_the_api_has_done(cloud: FakeCloud, body: str) -> None:
    api = Api(cloud)
    cloud.inject(Fault("malformed", method="POST", body=body))
    try:
        status, answer = api.create_node()
    except json.JSONDecodeError:
        assert body in ("html", "truncated", "empty")
    else:
        assert status == 200
        assert body in ("null", "list") or set(answer.values()) == {7}
    assert [resource["name"] for resource in cloud.resources()] == ["one"]


def test_date_header_shows_the_clock_of_the_fake(cloud: FakeCloud) -> None:
    api = Api(cloud)
    cloud.advance(123)
    with urllib.request.urlopen(f"{api.tpu}/nodes", timeout=60) as answer:
        assert parsedate_to_datetime(answer.headers["Date"]).timestamp() == cloud.now()


@pytest.mark.skipif(not fields.GCLOUD.is_dir(), reason="needs gcloud")
def test_fields_are_those_of_gcloud() -> None:
    code = "import json, sys; from fake import fields; print(json.dumps(fields.from_gcloud()))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout) == fields.tables()
