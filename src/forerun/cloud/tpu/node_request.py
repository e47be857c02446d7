"""Requests of the Cloud TPU API that create a slice. Pure functions of a `SliceRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.cloud import labels
from forerun.cloud.provider import Failure, RequestRefused, SliceRequest
from forerun.hardware.slices import slice_named

# The image of the machines. A wrong one has no driver for the chip, and training would run on the CPU.
# Source: the runtime versions page of Cloud TPU.
RUNTIMES: Mapping[str, str] = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_TYPES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
FLEX_START_MOST_SECONDS = 7 * 24 * 3600
STABLE, ALPHA = "v2", "v2alpha1"


@dataclass(frozen=True)
class CreateRequest:
    """An HTTP request. `path` follows the base address of the API."""

    path: str
    params: Mapping[str, str]
    body: Mapping[str, Any]


def location(project: str, zone: str) -> str:
    return f"projects/{project}/locations/{zone}"


def is_queued(request: SliceRequest) -> bool:
    """Return whether the request goes through a queue. On demand, it does only if it may wait for capacity."""
    return request.capacity != "on-demand" or request.wait_seconds is not None


def create_request(request: SliceRequest, project: str) -> CreateRequest:
    """Return the request that creates the node, or the queued resource whose node has the same name."""
    # Only v2alpha1 has the size of the boot disk and flex-start.
    version = ALPHA if request.capacity == "flex-start" or request.disk_gib is not None else STABLE
    parent = location(project, request.zone)
    if not is_queued(request):
        # v2 has no requestId for nodes; there, the name alone makes the request idempotent.
        ids = {"requestId": request.request_id} if version == ALPHA else {}
        return CreateRequest(f"{version}/{parent}/nodes", {"nodeId": request.name, **ids}, node_body(request))
    spec = {"parent": parent, "nodeId": request.name, "node": node_body(request)}
    body: dict[str, Any] = {"tpu": {"nodeSpec": [spec]}}
    if request.capacity == "spot":
        body["spot"] = {}
        if version == ALPHA:
            body["provisioningModel"] = "SPOT"
    if request.capacity == "flex-start":
        limit = min(request.limit_seconds or FLEX_START_MOST_SECONDS, FLEX_START_MOST_SECONDS)
        body |= {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": f"{limit}s"}}
    if request.capacity == "reservation":
        body["reservationName"] = reservation_name(request.reservation, parent)
    if request.wait_seconds is not None:
        body["queueingPolicy"] = {"validUntilDuration": f"{request.wait_seconds}s"}
    params = {"queuedResourceId": request.name, "requestId": request.request_id}
    return CreateRequest(f"{version}/{parent}/queuedResources", params, body)


def node_body(request: SliceRequest) -> dict[str, Any]:
    """Return the node as the API expects it, with all labels and metadata from its creation on."""
    wanted = slice_named(request.slice)
    generation = wanted.chip.name
    if generation not in RUNTIMES:
        raise RequestRefused(
            Failure.INVALID, f"{request.slice}: the Cloud TPU API ends with v6e; newer slices need Compute Engine"
        )
    network: dict[str, Any] = {"enableExternalIps": not request.internal_only}
    if request.network or not request.subnetwork:
        network["network"] = request.network or "default"
    if request.subnetwork:
        network["subnetwork"] = request.subnetwork
    body: dict[str, Any] = {
        **accelerator(wanted.name, generation),
        "runtimeVersion": request.image or RUNTIMES[generation],
        "networkConfig": network,
        "labels": {**request.labels, labels.CAPACITY: request.capacity},
        "metadata": dict(request.metadata),
    }
    if request.service_account:
        body["serviceAccount"] = {"email": request.service_account}
    if request.disk_gib is not None:
        body["bootDiskConfig"] = {"diskSizeGb": str(request.disk_gib)}
    return body


def accelerator(name: str, generation: str) -> dict[str, Any]:
    """Return the API's name of a slice: `v5litepod-8` for v5e-8, or a topology for `v5p:8x8x16`."""
    if ":" in name:
        return {"acceleratorConfig": {"type": _TYPES[generation], "topology": name.split(":")[1]}}
    return {"acceleratorType": name.replace("v5e-", "v5litepod-")}


def slice_of(node: Mapping[str, Any]) -> str:
    """Return forerun's name of a node's slice, or an empty string."""
    if node.get("acceleratorType"):
        return str(node["acceleratorType"]).replace("v5litepod-", "v5e-")
    config = node.get("acceleratorConfig") or {}
    generations = {name: generation for generation, name in _TYPES.items()}
    generation = generations.get(str(config.get("type")))
    return f"{generation}:{config.get('topology')}" if generation else ""


def reservation_name(name: str | None, parent: str) -> str:
    """Return the complete name of a reservation. Without a name, any reservation of the project is used."""
    return name if name and "/" in name else f"{parent}/reservations/{name or '-'}"
