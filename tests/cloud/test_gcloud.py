"""The real gcloud as the oracle: what forerun creates, gcloud lists, describes and deletes, and the other way round.

The requests of both are compared field by field. gcloud is a program of Google with its own messages, so a wrong name
or place of a field in a request of forerun shows here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake import PROJECT, FakeCloud

from forerun.cloud.provider import Provider, SliceRequest, SliceState
from forerun.cloud.providers import provider_named

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="needs gcloud")
ZONE, REGION = "us-east5-b", "us-east5"
LABELS = {"forerun-run": "one", "forerun-attempt": "1", "forerun-role": "slice"}
METADATA = {"forerun-folder": "gs-bucket-runs-one", "forerun-max-usd": "40"}
LABEL_FLAG = "--labels=" + ",".join(f"{key}={value}" for key, value in LABELS.items())
METADATA_FLAG = "--metadata=" + ",".join(f"{key}={value}" for key, value in METADATA.items())


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gcloud")


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as running:
        yield running


class Gcloud:
    def __init__(self, cloud: FakeCloud, configuration: Path) -> None:
        self.environment = os.environ | cloud.environment() | {"CLOUDSDK_CONFIG": str(configuration)}

    def __call__(self, *arguments: str) -> Any:
        command = ["gcloud", *arguments, "--format=json", "--quiet"]
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout or "null")


@pytest.fixture
def gcloud(cloud: FakeCloud, configuration: Path) -> Gcloud:
    return Gcloud(cloud, configuration)


def provider(name: str, cloud: FakeCloud) -> Provider:
    return provider_named(name, environment=cloud.environment())


def request(name: str = "forerun-one-1", **changes: Any) -> SliceRequest:
    settings: dict[str, Any] = {
        "name": name,
        "slice": "v6e-16",
        "zone": ZONE,
        "capacity": "on-demand",
        "labels": LABELS,
        "metadata": METADATA,
        "request_id": "7d2b6c1e-0000-5000-8000-000000000001",
    }
    return SliceRequest(**settings | changes)


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Return {path of a field: value}. Links are shortened to what follows the version of the API."""
    if isinstance(value, Mapping) and value:
        return {key: one for name, inner in value.items() for key, one in flat(inner, f"{place}.{name}").items()}
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, dict) and set(one) == {"key", "value"} for one in value)
    ):
        return {f"{place}[{one['key']}]": one["value"] for one in value}
    if isinstance(value, list):
        return {key: one for index, inner in enumerate(value) for key, one in flat(inner, f"{place}[{index}]").items()}
    if isinstance(value, str):
        # Both names of an image family mean its newest image.
        value = value.replace("/zones/-/imageFamilyViews/", "/global/images/family/")
        value = re.sub(rf"^(https?://[^/]+/compute/v1/)?(projects/{PROJECT}/)?", "", value)
    return {place.lstrip("."): value}


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that only forerun sends, and those that only gcloud sends."""
    first, second = flat(ours), flat(theirs)
    differing = {key: (first[key], second[key]) for key in first.keys() & second.keys() if first[key] != second[key]}
    assert differing == {}
    only_ours = {key: value for key, value in first.items() if key not in second}
    return only_ours, {key: value for key, value in second.items() if key not in first}


def posted(cloud: FakeCloud, kind: str) -> list[dict[str, Any]]:
    return [one for one in cloud.requests() if one["method"] == "POST" and one["path"].endswith(f"/{kind}")]


def test_node_of_forerun_is_that_of_gcloud(cloud: FakeCloud, gcloud: Gcloud) -> None:
    tpu = provider("tpu", cloud)
    tpu.create(request())
    assert tpu.status("forerun-one-1", ZONE).state in (SliceState.CREATING, SliceState.READY)
    accelerator = ["--accelerator-type=v6e-16", "--version=v2-alpha-tpuv6e"]
    gcloud(
        "compute", "tpus", "tpu-vm", "create", "by-gcloud", f"--zone={ZONE}", *accelerator, LABEL_FLAG, METADATA_FLAG
    )
    ours, theirs = posted(cloud, "nodes")
    assert (ours["path"], set(ours["query"])) == (theirs["path"], set(theirs["query"]))
    # forerun names the capacity in a label. gcloud repeats defaults of the API.
    assert compare(ours["body"], theirs["body"]) == (
        {"labels.forerun-capacity": "on-demand"},
        {
            "schedulingConfig.preemptible": False,
            "schedulingConfig.reserved": False,
            "schedulingConfig.spot": False,
            "shieldedInstanceConfig.enableSecureBoot": False,
        },
    )
    # gcloud lists and describes both; forerun lists and describes both.
    listed = {one["name"].split("/")[-1]: one for one in gcloud("compute", "tpus", "tpu-vm", "list", "--zone=-")}
    assert set(listed) == {"forerun-one-1", "by-gcloud"}
    shown = gcloud("compute", "tpus", "tpu-vm", "describe", "forerun-one-1", f"--zone={ZONE}")
    assert (shown["state"], shown["labels"], shown["metadata"]) == (
        "READY",
        {**LABELS, "forerun-capacity": "on-demand"},
        METADATA,
    )
    hosts = [endpoint["accessConfig"]["externalIp"] for endpoint in shown["networkEndpoints"]]
    assert [one.address for one in tpu.addresses("forerun-one-1", ZONE)] == hosts
    assert {(one.kind, one.name, one.slice) for one in tpu.list()} == {
        ("node", "forerun-one-1", "v6e-16"),
        ("node", "by-gcloud", "v6e-16"),
    }
    assert tpu.status("by-gcloud", ZONE).state is SliceState.READY
    # Each deletes what the other has created.
    tpu.delete("by-gcloud", ZONE)
    gcloud("compute", "tpus", "tpu-vm", "delete", "forerun-one-1", f"--zone={ZONE}")
    assert tpu.status("forerun-one-1", ZONE).state is SliceState.ABSENT
    assert cloud.resources() == []


def test_spot_request_of_forerun_is_that_of_gcloud(cloud: FakeCloud, gcloud: Gcloud) -> None:
    tpu = provider("tpu", cloud)
    tpu.create(request(capacity="spot", wait_seconds=600))
    queue = ["compute", "tpus", "queued-resources"]
    node = ["--node-id=by-gcloud", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e", "--spot"]
    wait = "--valid-until-duration=600s"
    gcloud(*queue, "create", "by-gcloud", f"--zone={ZONE}", *node, wait, LABEL_FLAG, METADATA_FLAG)
    ours, theirs = posted(cloud, "queuedResources")
    assert ours["path"] == theirs["path"]
    spec = "tpu.nodeSpec[0]"
    theirs["body"]["tpu"]["nodeSpec"][0]["nodeId"] = "forerun-one-1"
    assert compare(ours["body"], theirs["body"]) == (
        {f"{spec}.node.labels.forerun-capacity": "spot"},
        {f"{spec}.node.serviceAccount": {}},
    )
    cloud.advance(1)
    listed = {one["name"].split("/")[-1]: one for one in gcloud(*queue, "list", f"--zone={ZONE}")}
    assert {name: one["state"]["state"] for name, one in listed.items()} == {
        "forerun-one-1": "ACTIVE",
        "by-gcloud": "ACTIVE",
    }
    assert tpu.status("by-gcloud", ZONE).state is SliceState.READY
    tpu.delete("by-gcloud", ZONE)
    gcloud(*queue, "delete", "forerun-one-1", f"--zone={ZONE}", "--force")
    assert [(one.kind, one.name) for one in tpu.list()] == []
    assert cloud.resources() == []


def test_flex_start_request_of_forerun_is_that_of_gcloud(cloud: FakeCloud, gcloud: Gcloud) -> None:
    provider("tpu", cloud).create(request(capacity="flex-start", limit_seconds=3600))
    node = ["--node-id=forerun-one-1", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e"]
    flex = ["--provisioning-model=flex-start", "--max-run-duration=1h"]
    flags = [f"--zone={ZONE}", *node, *flex, LABEL_FLAG, METADATA_FLAG, "--async"]
    cloud.set_capacity(ZONE, "v6e-16", 0)
    provider("tpu", cloud).delete("forerun-one-1", ZONE)
    gcloud("alpha", "compute", "tpus", "queued-resources", "create", "by-gcloud", *flags)
    ours, theirs = posted(cloud, "queuedResources")
    assert ours["path"] == theirs["path"]
    assert ours["path"].startswith("/v2alpha1/")
    assert compare(ours["body"], theirs["body"]) == (
        {"tpu.nodeSpec[0].node.labels.forerun-capacity": "flex-start"},
        {"tpu.nodeSpec[0].node.serviceAccount": {}, "tpu.nodeSpec[0].node.autocheckpointEnabled": False},
    )


# What the API assumes without these fields. gcloud sends them always.
INSTANCE_DEFAULTS = {
    "canIpForward": False,
    "disks[0].mode": "READ_WRITE",
    "disks[0].type": "PERSISTENT",
    "scheduling.preemptible": True,  # the older name of SPOT
}
IMAGE = ["--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e", "--image-project=ubuntu-os-accelerator-images"]
SPOT = ["--provisioning-model=SPOT", "--max-run-duration=1h", "--instance-termination-action=DELETE"]
MACHINE = [*IMAGE, *SPOT, "--maintenance-policy=TERMINATE", "--boot-disk-size=100GB", "--scopes=cloud-platform"]


def without_disk_labels(body: dict[str, Any]) -> dict[str, Any]:
    """Check and remove what gcloud has no flag for: labels of the boot disk."""
    assert body["disks"][0]["initializeParams"].pop("labels") == LABELS
    return body


def test_instance_of_forerun_is_that_of_gcloud(cloud: FakeCloud, gcloud: Gcloud) -> None:
    compute = provider("compute", cloud)
    compute.create(request(slice="v6e-8", capacity="spot", limit_seconds=3600))
    metadata = f"{METADATA_FLAG},enable-guest-attributes=TRUE"
    labels = LABEL_FLAG.replace("attempt=1", "attempt=2")
    machine = ["--machine-type=ct6e-standard-8t", *MACHINE, labels, metadata, "--description=mine"]
    gcloud("compute", "instances", "create", "by-gcloud", f"--zone={ZONE}", *machine)
    ours, theirs = posted(cloud, "instances")
    assert ours["path"] == theirs["path"]
    assert set(ours["query"]) == {"requestId"}
    theirs["body"]["labels"]["forerun-attempt"] = "1"
    body = without_disk_labels(ours["body"]) | {"name": "by-gcloud", "description": "mine"}
    theirs["body"]["networkInterfaces"][0]["accessConfigs"][0]["name"] = "External NAT"
    assert compare(body, theirs["body"]) == (
        {},
        INSTANCE_DEFAULTS
        | {"deletionProtection": False}
        | {
            f"shieldedInstanceConfig.{key}": value
            for key, value in theirs["body"].get("shieldedInstanceConfig", {}).items()
        },
    )
    listed = gcloud("compute", "instances", "list", "--filter=labels.forerun-run=one")
    assert {one["name"]: one["status"] for one in listed} == {"forerun-one-1": "RUNNING", "by-gcloud": "RUNNING"}
    assert {(one.kind, one.name) for one in compute.list() if one.kind == "instance"} == {
        ("instance", "forerun-one-1"),
        ("instance", "by-gcloud"),
    }
    assert compute.status("by-gcloud", ZONE).state is SliceState.READY
    keys = gcloud(
        "compute", "instances", "get-guest-attributes", "forerun-one-1", f"--zone={ZONE}", "--query-path=hostkeys/"
    )
    assert compute.host_keys("forerun-one-1", ZONE) == [[f"{one['key']} {one['value']}" for one in keys]]
    gcloud("compute", "instances", "delete", "forerun-one-1", f"--zone={ZONE}")
    compute.delete("by-gcloud", ZONE)
    assert cloud.resources() == []


def test_group_of_forerun_is_that_of_gcloud(cloud: FakeCloud, gcloud: Gcloud) -> None:
    compute = provider("compute", cloud)
    compute.create(request(slice="v6e-16", capacity="spot", limit_seconds=3600))
    name, place = "by-gcloud", f"projects/{PROJECT}/regions/{REGION}"
    metadata = f"{METADATA_FLAG},enable-guest-attributes=TRUE"
    topology = ["--type=HIGH_THROUGHPUT", "--accelerator-topology=4x4"]
    gcloud("compute", "resource-policies", "create", "workload-policy", name, f"--region={REGION}", *topology)
    labels = LABEL_FLAG.replace("attempt=1", "attempt=2")  # the machines of a group are found by their labels
    template = ["--machine-type=ct6e-standard-4t", *MACHINE, labels, metadata]
    gcloud("compute", "instance-templates", "create", name, f"--instance-template-region={REGION}", *template)
    group = ["--size=4", f"--template={place}/instanceTemplates/{name}", "--default-action-on-vm-failure=do-nothing"]
    group += [f"--workload-policy={place}/resourcePolicies/{name}", f"--base-instance-name={name}-##"]
    gcloud("compute", "instance-groups", "managed", "create", name, f"--zone={ZONE}", *group)

    def bodies(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        ours, theirs = posted(cloud, kind)
        assert ours["path"] == theirs["path"]
        text = json.dumps(ours["body"]).replace("forerun-one-1", name)
        return json.loads(text), theirs["body"]

    ours, theirs = bodies("resourcePolicies")
    assert set(compare(ours, theirs)[0]) == {"description"}
    assert compare(ours, theirs)[1] == {"region": REGION}
    ours, theirs = bodies("instanceTemplates")
    without_disk_labels(ours["properties"])
    theirs["properties"]["labels"]["forerun-attempt"] = "1"
    theirs["properties"]["networkInterfaces"][0]["accessConfigs"][0]["name"] = "External NAT"
    only_ours, only_theirs = compare(ours, theirs)
    assert set(only_ours) == {"description", "properties.description"}
    assert only_theirs == {f"properties.{key}": value for key, value in INSTANCE_DEFAULTS.items()} | {"region": REGION}
    ours, theirs = bodies("instanceGroupManagers")
    only_ours, only_theirs = compare(ours, theirs)
    # gcloud 528 has no flag for targetSizePolicy.
    assert set(only_ours) == {"description", "targetSizePolicy.mode", "updatePolicy.type"}
    assert only_theirs == {"zone": ZONE}

    listed = gcloud("compute", "instance-groups", "managed", "list")
    assert {one["name"]: one["targetSize"] for one in listed} == {"forerun-one-1": 4, name: 4}
    members = gcloud("compute", "instance-groups", "managed", "list-instances", "forerun-one-1", f"--zone={ZONE}")
    assert [one["instanceStatus"] for one in members] == ["RUNNING"] * 4
    assert compute.status("forerun-one-1", ZONE).state is SliceState.READY
    assert len(compute.addresses("forerun-one-1", ZONE)) == 4
    for one in ("forerun-one-1", name):
        compute.delete(one, ZONE)
    assert cloud.resources() == []
