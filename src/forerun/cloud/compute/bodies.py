"""The requests that create a slice, as pure functions of a `SliceRequest`.

Instances and disks carry the labels. Instance groups, templates and policies have no labels in the API: their
description contains the same values as JSON, so that every resource tells from its creation on to which run it belongs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.machine_types import MachineShape, machine_shape
from forerun.cloud.google.answer_shape import Description, shape_problem
from forerun.cloud.provider import SliceRequest
from forerun.errors import UserError

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
DAY_SECONDS = 24 * 3600
# compute/docs/instances/limit-vm-runtime: 30 s to 120 days; flex-start: at most 7 days.
SHORTEST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS, LONGEST_FLEX_SECONDS = 30, 120 * DAY_SECONDS, 7 * DAY_SECONDS
_MODELS = {"on-demand": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START", "reservation": "STANDARD"}
# Metadata that `forerun ps` shows. It is repeated in descriptions, which have at most 2,048 characters.
_DESCRIBED = (cloud_labels.FOLDER, cloud_labels.USD_PER_HOUR, cloud_labels.MAX_USD)


@dataclass(frozen=True)
class ComputeCall:
    """One request of a creation. `path` follows the base address of the API."""

    kind: str
    path: str
    body: Mapping[str, Any]
    params: Mapping[str, str] = field(default_factory=dict)


def region_of(zone: str) -> str:
    """Return the region of a zone: `us-central1` for `us-central1-a`."""
    return zone.rpartition("-")[0]


def creation_calls(project: str, request: SliceRequest) -> list[ComputeCall]:
    """Return the requests that create a slice, in their order.

    One machine is an instance. A TPU slice of several machines is a managed instance group, with a template for its
    machines and a workload policy that states its topology.
    """
    shape = machine_shape(request.slice)
    zone, region = f"projects/{project}/zones/{request.zone}", f"projects/{project}/regions/{region_of(request.zone)}"
    if shape.hosts == 1:
        body = instance_body(request, shape)
        return [ComputeCall("instance", f"{zone}/instances", body, {"requestId": request.request_id})]
    policy = policy_body(request, shape)
    template = template_body(request, shape)
    group = group_body(project, request, shape)
    # One request ID must not be shared by requests of different kinds.
    return [
        ComputeCall("policy", f"{region}/resourcePolicies", policy),
        ComputeCall("template", f"{region}/instanceTemplates", template),
        ComputeCall("instance group", f"{zone}/instanceGroupManagers", group, {"requestId": request.request_id}),
    ]


def limit_of(request: SliceRequest) -> int | None:
    """Return the seconds after which the API deletes the machines, or None without a limit.

    A flex-start request must have a limit, so that it gets the longest one if the run has none.
    """
    longest = LONGEST_FLEX_SECONDS if request.capacity == "flex-start" else LONGEST_LIMIT_SECONDS
    if request.limit_seconds is None:
        return longest if request.capacity == "flex-start" else None
    return min(max(request.limit_seconds, SHORTEST_LIMIT_SECONDS), longest)


def scheduling(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    """Return how the machines are provisioned, and when the API deletes them.

    Machines with accelerators are never restarted automatically: a restarted machine is billed although the run may
    have a new slice.
    """
    model = _MODELS[request.capacity]
    limit = limit_of(request)
    wanted: dict[str, Any] = {
        "provisioningModel": model,
        "onHostMaintenance": "MIGRATE" if shape.may_migrate and model == "STANDARD" else "TERMINATE",
        "automaticRestart": shape.may_migrate and model == "STANDARD",
    }
    if limit is not None:
        wanted["maxRunDuration"] = {"seconds": str(limit)}
    if limit is not None or model != "STANDARD":
        # The API accepts an action only together with a reason to end: a limit, or a preemption.
        wanted["instanceTerminationAction"] = "DELETE"
    return wanted


def properties(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    """Return the properties that an instance and a template have in common."""
    metadata = {"enable-guest-attributes": "TRUE", **request.metadata}
    wanted: dict[str, Any] = {
        "description": description(request, shape),
        "labels": dict(request.labels),
        "metadata": {"items": [{"key": key, "value": value} for key, value in sorted(metadata.items())]},
        "disks": [_boot_disk(request, shape)],
        "networkInterfaces": [_network(request, shape)],
        "serviceAccounts": [{"email": request.service_account or "default", "scopes": [SCOPE]}],
        "scheduling": scheduling(request, shape),
    }
    if request.capacity == "reservation":
        wanted["reservationAffinity"] = _reservation(request)
    elif request.capacity == "flex-start":
        wanted["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
    return wanted


def instance_body(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    body = {
        "name": request.name,
        "machineType": f"zones/{request.zone}/machineTypes/{shape.machine_type}",
        **properties(request, shape),
    }
    if request.capacity == "flex-start" and request.wait_seconds is not None:
        body["params"] = {"requestValidForDuration": {"seconds": str(request.wait_seconds)}}
    return body


def template_body(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    return {
        "name": request.name,
        "description": description(request, shape),
        "properties": {"machineType": shape.machine_type, **properties(request, shape)},
    }


def policy_body(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    return {
        "name": request.name,
        "description": description(request, shape),
        "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": shape.topology},
    }


def group_body(project: str, request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    """Return a managed instance group that creates all machines together and never replaces one.

    Without DO_NOTHING, the group would replace machines that the limit deleted, and the limit would have no effect.
    """
    region = f"projects/{project}/regions/{region_of(request.zone)}"
    return {
        "name": request.name,
        "description": description(request, shape),
        # The number signs become digits: machines are numbered in the order of their names.
        "baseInstanceName": f"{request.name}-{'#' * max(len(str(shape.hosts)), 2)}",
        "instanceTemplate": f"{region}/instanceTemplates/{request.name}",
        "targetSize": shape.hosts,
        "targetSizePolicy": {"mode": "BULK"},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
        "resourcePolicies": {"workloadPolicy": f"{region}/resourcePolicies/{request.name}"},
        "updatePolicy": {"type": "OPPORTUNISTIC"},
    }


def description(request: SliceRequest, shape: MachineShape) -> str:
    """Return the labels, and what else `forerun ps` needs, as JSON."""
    metadata = {key: request.metadata[key] for key in _DESCRIBED if key in request.metadata}
    return json.dumps(
        {
            "labels": dict(request.labels),
            "metadata": metadata,
            "slice": request.slice,
            "capacity": request.capacity,
            "zone": request.zone,
            "hosts": shape.hosts,
        },
        sort_keys=True,
    )


def read_description(text: object) -> dict[str, Any]:
    """Return the values in a description, or an empty dictionary if forerun did not write it."""
    try:
        values = json.loads(str(text or ""))
    except (ValueError, RecursionError):
        return {}
    return {} if shape_problem(values, Description) else values


def _boot_disk(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    # The disk is deleted with its machine. Its type is the default of the machine type.
    return {
        "boot": True,
        "autoDelete": True,
        "initializeParams": {
            "sourceImage": request.image or shape.image,
            "diskSizeGb": str(request.disk_gib or shape.disk_gib),
            "labels": dict(request.labels),
        },
    }


def _network(request: SliceRequest, shape: MachineShape) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if request.subnetwork:
        short = f"regions/{region_of(request.zone)}/subnetworks/{request.subnetwork}"
        wanted["subnetwork"] = request.subnetwork if "/" in request.subnetwork else short
    if request.network or not request.subnetwork:
        network = request.network or "default"
        wanted["network"] = network if "/" in network else f"global/networks/{network}"
    if shape.machine_type.startswith("a3-"):
        wanted["nicType"] = "GVNIC"  # a3 machines accept no other kind
    if not request.internal_only:
        wanted["accessConfigs"] = [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}]
    return wanted


def _reservation(request: SliceRequest) -> dict[str, Any]:
    if not request.reservation:
        raise UserError(
            "E-CLOUD-021",
            f"{request.name}: the capacity 'reservation' needs the name of a reservation",
            why="a project may have several reservations, and each one is for one kind of machine in one zone",
            fix="--reservation NAME",
        )
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [request.reservation],
    }
