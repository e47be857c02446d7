"""Requests that create TPU slices. Google's own client checks names and enums of the fields."""

import dataclasses
import json
from typing import Any

import pytest

from forerun.cloud.provider import Failure, RequestRefused, SliceRequest
from forerun.cloud.tpu.node_request import CreateRequest, create_request, slice_of

UUID = "5b1d1c5e-0000-4000-8000-000000000001"
PARENT = "projects/p/locations/us-east5-b"
REQUEST = SliceRequest(
    name="forerun-run-1",
    slice="v6e-8",
    zone="us-east5-b",
    capacity="on-demand",
    labels={"forerun-run": "run"},
    metadata={"startup-script": "#! /bin/bash\n"},
    request_id=UUID,
)


def request_with(**changes: Any) -> CreateRequest:
    return create_request(dataclasses.replace(REQUEST, **changes), "p")


def node_in(request: CreateRequest) -> Any:
    return request.body["tpu"]["nodeSpec"][0]["node"] if "tpu" in request.body else request.body


def test_on_demand_is_a_node() -> None:
    found = request_with()
    assert found.path == f"v2/{PARENT}/nodes"
    assert found.params == {"nodeId": "forerun-run-1"}  # v2 refuses a requestId here
    assert found.body == {
        "acceleratorType": "v6e-8",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "networkConfig": {"enableExternalIps": True, "network": "default"},
        "labels": {"forerun-run": "run", "forerun-capacity": "on-demand"},
        "metadata": {"startup-script": "#! /bin/bash\n"},
    }


@pytest.mark.parametrize(
    ("changes", "version", "body"),
    [
        ({"capacity": "spot"}, "v2", {"spot": {}}),
        ({"capacity": "spot", "disk_gib": 500}, "v2alpha1", {"spot": {}, "provisioningModel": "SPOT"}),
        (
            {"capacity": "flex-start", "limit_seconds": 7200},
            "v2alpha1",
            {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "7200s"}},
        ),
        (
            {"capacity": "flex-start", "limit_seconds": 10**7},
            "v2alpha1",
            {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "604800s"}},
        ),
        ({"capacity": "reservation"}, "v2", {"reservationName": f"{PARENT}/reservations/-"}),
        ({"capacity": "reservation", "reservation": "r"}, "v2", {"reservationName": f"{PARENT}/reservations/r"}),
        (
            {"capacity": "reservation", "reservation": "projects/o/locations/z/reservations/r"},
            "v2",
            {"reservationName": "projects/o/locations/z/reservations/r"},
        ),
        ({"wait_seconds": 3600}, "v2", {"queueingPolicy": {"validUntilDuration": "3600s"}}),
    ],
)
def test_the_rest_goes_through_the_queue(changes: Any, version: str, body: Any) -> None:
    found = request_with(**changes)
    assert found.path == f"{version}/{PARENT}/queuedResources"
    assert found.params == {"queuedResourceId": "forerun-run-1", "requestId": UUID}
    spec = found.body["tpu"]["nodeSpec"][0]
    assert (spec["parent"], spec["nodeId"]) == (PARENT, "forerun-run-1")
    assert spec["node"]["labels"]["forerun-run"] == "run"
    assert {name: value for name, value in found.body.items() if name != "tpu"} == body


@pytest.mark.parametrize(
    ("slice", "name", "runtime"),
    [
        ("v2-8", "v2-8", "tpu-ubuntu2204-base"),
        ("v3-32", "v3-32", "tpu-ubuntu2204-base"),
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5"),
        ("v6e-256", "v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_has_its_image(slice: str, name: str, runtime: str) -> None:
    node = request_with(slice=slice).body
    assert (node["acceleratorType"], node["runtimeVersion"]) == (name, runtime)
    assert slice_of(node) == slice


def test_options_of_the_machines() -> None:
    node = request_with(
        image="mine", subnetwork="s", internal_only=True, service_account="a@b", disk_gib=300, slice="v5p:4x4x20"
    ).body
    assert node["runtimeVersion"] == "mine"
    assert node["networkConfig"] == {"enableExternalIps": False, "subnetwork": "s"}
    assert node["serviceAccount"] == {"email": "a@b"}
    assert node["bootDiskConfig"] == {"diskSizeGb": "300"}
    assert node["acceleratorConfig"] == {"type": "V5P", "topology": "4x4x20"}
    assert slice_of(node) == "v5p:4x4x20"
    assert request_with(disk_gib=300).params == {"nodeId": "forerun-run-1", "requestId": UUID}


def test_tpu7x_needs_another_api() -> None:
    with pytest.raises(RequestRefused) as caught:
        request_with(slice="tpu7x-2x2x1")
    assert caught.value.failure is Failure.INVALID


@pytest.mark.parametrize("capacity", ["on-demand", "spot", "reservation"])
@pytest.mark.parametrize("slice", ["v5e-16", "v5p:4x4x20"])
def test_googles_client_knows_every_field(capacity: Any, slice: str) -> None:
    """Unknown names and values of enums are errors of its parser. It lacks flex-start and the boot disk."""
    from google.cloud import tpu_v2

    request = request_with(
        capacity=capacity, slice=slice, network="n", subnetwork="s", service_account="a@b", internal_only=True
    )
    kind = tpu_v2.Node if capacity == "on-demand" else tpu_v2.QueuedResource
    parsed = kind.from_json(json.dumps(request.body), ignore_unknown_fields=False)
    node = parsed if capacity == "on-demand" else parsed.tpu.node_spec[0].node
    assert dict(node.labels) == {"forerun-run": "run", "forerun-capacity": capacity}
    assert capacity == "on-demand" or ("spot" in parsed) == (capacity == "spot")
