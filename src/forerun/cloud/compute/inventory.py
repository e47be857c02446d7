"""The list of all resources on Compute Engine that forerun created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import read_description
from forerun.cloud.compute.calls import LABELLED, ComputeCalls, labels_of, metadata_of
from forerun.cloud.compute.states import group_status, instance_status, last_part
from forerun.cloud.google.timestamps import seconds_of
from forerun.cloud.provider import Resource, SliceState, SliceStatus, ZonesUnreachable

_NAMED = f'name eq "{cloud_labels.PREFIX}-.*"'  # the filter for kinds without labels
_MODELS = {"STANDARD": "on-demand", "SPOT": "spot", "FLEX_START": "flex-start", "RESERVATION_BOUND": "reservation"}
_CREATED_BY = "created-by"  # metadata of an instance: the group that created it


def resources(calls: ComputeCalls) -> list[Resource]:
    """Return everything that forerun created and that exists, in all zones.

    A group represents its machines. Machines and disks are listed on their own if no group or machine represents them.

    Raises:
      ZonesUnreachable: Some zones do not answer.
    """
    unreachable: set[str] = set()

    def listed(kind: str, filter: str) -> list[dict[str, Any]]:
        found, missing = calls.everywhere(kind, filter)
        unreachable.update(missing)
        return [one for one in found if cloud_labels.RUN in labels_of(one)]

    instances, disks = listed("instances", LABELLED), listed("disks", LABELLED)
    groups = listed("instanceGroupManagers", _NAMED)
    templates, policies = listed("instanceTemplates", _NAMED), listed("resourcePolicies", _NAMED)
    grouped = {(last_part(one.get("zone")), str(one.get("name"))) for one in groups}
    found = [_group(calls, one, instances) for one in groups]
    found += [_instance(one) for one in instances if _group_of(one) not in grouped]
    # A boot disk is deleted with its machine. A disk without a user is left over.
    found += [_other("disk", one, costs_money=True) for one in disks if not one.get("users")]
    found += [_other("template", one) for one in templates]
    found += [_other("policy", one) for one in policies]
    if unreachable:
        raise ZonesUnreachable(sorted(unreachable), found)
    return found


def _group_of(instance: Mapping[str, Any]) -> tuple[str, str]:
    return last_part(instance.get("zone")), last_part(metadata_of(instance).get(_CREATED_BY, ""))


def _group(calls: ComputeCalls, group: Mapping[str, Any], instances: list[dict[str, Any]]) -> Resource:
    name, zone = str(group.get("name")), last_part(group.get("zone"))
    described = read_description(group.get("description"))
    members = [one for one in instances if _group_of(one) == (zone, name)]
    hosts, capacity = int(described.get("hosts") or 1), str(described.get("capacity") or "")
    status = group_status(group, calls.managed(name, zone), members, [], hosts, capacity)
    return Resource(
        provider="compute",
        kind="instance group",
        name=name,
        zone=zone,
        status=status,
        labels=labels_of(group),
        metadata=metadata_of(group),
        slice=str(described.get("slice") or ""),
        capacity=capacity,
        created_at=seconds_of(group.get("creationTimestamp")),
        costs_money=True,
    )


def _instance(instance: Mapping[str, Any]) -> Resource:
    described = read_description(instance.get("description"))
    model = str((instance.get("scheduling") or {}).get("provisioningModel") or "STANDARD")
    return Resource(
        provider="compute",
        kind="instance",
        name=str(instance.get("name")),
        zone=last_part(instance.get("zone")),
        status=instance_status(instance),
        labels=labels_of(instance),
        metadata=metadata_of(instance),
        slice=str(described.get("slice") or last_part(instance.get("machineType"))),
        capacity=str(described.get("capacity") or _MODELS.get(model, model)),
        created_at=seconds_of(instance.get("creationTimestamp")),
    )


def _other(kind: str, resource: Mapping[str, Any], *, costs_money: bool = False) -> Resource:
    """Return a disk, template or policy. The zone is that of its slice, as `delete` needs it."""
    described = read_description(resource.get("description"))
    region = last_part(resource.get("region"))
    return Resource(
        provider="compute",
        kind=kind,
        name=str(resource.get("name")),
        zone=last_part(resource.get("zone")) or str(described.get("zone") or f"{region}-a"),
        status=SliceStatus(SliceState.STOPPED, str(resource.get("status") or "")),
        labels=labels_of(resource),
        metadata=metadata_of(resource),
        created_at=seconds_of(resource.get("creationTimestamp")),
        costs_money=costs_money,
    )
