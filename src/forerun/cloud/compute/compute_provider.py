"""The provider of Compute Engine: TPU slices of v5p, v6e and tpu7x, GPU machines, and the keeper's small machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import ComputeCall, creation_calls, read_description
from forerun.cloud.compute.calls import LABELLED, ComputeCalls, labels_of, metadata_of
from forerun.cloud.compute.states import (
    absent_status,
    ended_at,
    failure_of,
    group_status,
    instance_status,
    is_on_instance,
    last_part,
)
from forerun.cloud.google.answer_shape import ComputeOperation, ComputeResource, Instance, InstanceGroup
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.clock import seconds_of
from forerun.cloud.google.rest import PollPauses, Rest
from forerun.cloud.provider import (
    Failure,
    HostAddress,
    NameTaken,
    RequestRefused,
    Resource,
    SliceRequest,
    SliceState,
    SliceStatus,
    ZonesUnreachable,
)

NAME = "compute"


class ComputeProvider:
    """Creates and deletes slices in one project. It implements `forerun.cloud.provider.Provider`."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self.calls = ComputeCalls(rest)

    @property
    def name(self) -> str:
        return NAME

    def now(self) -> float:
        return self.rest.now()

    def enforces_limit(self, request: SliceRequest) -> bool:
        """Return True for each request with a limit: `maxRunDuration` holds for every kind of capacity."""
        return request.limit_seconds is not None

    def requests(self, request: SliceRequest) -> list[dict[str, object]]:
        calls = creation_calls(self.rest.project, request)
        return [self.rest.description("POST", "compute", call.path, call.body, call.params or None) for call in calls]

    def create(self, request: SliceRequest) -> None:
        """Request a slice. Wait only for the template and the policy, which the group needs."""
        calls = creation_calls(self.rest.project, request)
        for call in calls:
            operation = self._send(call, request)
            if operation is None or (call is calls[-1] and operation.get("status") != "DONE"):
                continue
            try:
                self.calls.wait(operation)
            except ApiError as error:
                if not error.is_duplicate:
                    raise RequestRefused(failure_of(error), error.message) from error

    def status(self, name: str, zone: str) -> SliceStatus:
        instance = self.calls.find(f"{self.calls.zone_path(zone)}/instances/{name}", Instance)
        if instance is not None:
            return instance_status(instance)
        group = self.calls.find(f"{self.calls.zone_path(zone)}/instanceGroupManagers/{name}", InstanceGroup)
        if group is None:
            return absent_status(name, self.calls.operations(name, zone))
        described = read_description(group.get("description"))
        hosts = int(described.get("hosts") or group.get("targetSize") or 1)
        managed, members = self.calls.managed(name, zone), self.calls.members(name, zone)
        running = [one for one in members if one.get("status") == "RUNNING"]
        operations = [] if len(running) == hosts else self.calls.operations(name, zone)
        on_instances = [one for one in operations if is_on_instance(one)]
        return group_status(group, managed, members, on_instances, hosts, str(described.get("capacity") or ""))

    def delete(self, name: str, zone: str) -> float | None:
        """Delete what exists of a slice, kind by kind, until nothing is left.

        Each round asks the cloud what exists. A deletion is therefore verified, and it can be repeated by any process.
        """
        pauses = PollPauses(self.rest, f"the deletion of {name} in {zone}")
        ended: list[float] = []
        while True:
            kind, paths = next(((kind, paths) for kind, paths in self.calls.existing(name, zone) if paths), ("", []))
            if not paths and not self.calls.is_creating(name, zone):
                return max(ended, default=None) or self._machines_ended_at(name, zone)
            # The deletion of a group ends the billing only if its machines exist: the limit may have deleted them.
            bills = kind == "instance" or (kind == "instance group" and bool(self.calls.members(name, zone)))
            operations = [operation for path in paths if (operation := self.calls.delete(path)) is not None]
            done = [found for operation in operations if (found := self._deleted(operation)) is not None]
            ended += [at for operation in done if bills and (at := ended_at([operation])) is not None]
            if not done:
                pauses.pause()

    def list(self) -> Sequence[Resource]:
        return resources(self.calls)

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        found = []
        for index, instance in enumerate(self.calls.members(name, zone)):
            network = (instance.get("networkInterfaces") or [{}])[0]
            internal = str(network.get("networkIP") or "")
            external = [str(one.get("natIP")) for one in network.get("accessConfigs") or [] if one.get("natIP")]
            found.append(HostAddress(index, (external or [internal])[0], internal, instance=str(instance["name"])))
        return found

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        """Return the keys that the guest agents have reported; none before all have."""
        members = self.calls.members(name, zone)
        found = [self.calls.host_keys(str(instance["name"]), zone) for instance in members]
        return found if all(found) else []

    def _send(self, call: ComputeCall, request: SliceRequest) -> dict[str, Any] | None:
        """Send one request of a creation. Return None if its resource exists already and belongs to this run."""
        try:
            return self.rest.call("POST", "compute", call.path, call.body, call.params or None, ComputeOperation)
        except ApiError as error:
            if not error.is_duplicate:
                raise RequestRefused(failure_of(error), error.message) from error
            found = self.calls.find(
                f"{call.path}/{request.name}", Instance if call.kind == "instance" else ComputeResource
            )
            if found is None:
                raise RequestRefused(Failure.OTHER, error.message) from error
            _check_owner(call.kind, found, request)
            return None

    def _machines_ended_at(self, name: str, zone: str) -> float | None:
        """Return when the cloud or another process ended the machines, if operations tell it."""
        operations = self.calls.operations(name, zone)
        # An instance group may be deleted long after its machines, so that its own operations do not count.
        return ended_at([one for one in operations if is_on_instance(one)])

    def _deleted(self, operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a deletion when it is done, or None if it failed: another process may delete the same resource."""
        try:
            return self.calls.wait(operation)
        except ApiError:
            return None


def _check_owner(kind: str, found: Mapping[str, Any], request: SliceRequest) -> None:
    """Raise an error if an existing resource belongs to another run with the same name."""
    theirs = metadata_of(found).get(cloud_labels.FOLDER, "")
    ours = request.metadata.get(cloud_labels.FOLDER, "")
    if theirs != ours:
        raise NameTaken(
            "E-CLOUD-022",
            f"{request.zone} has a resource {request.name!r} of another run",
            why=f"its {kind} belongs to the run in {theirs or 'no folder'}; this run is in {ours or 'no folder'}",
            fix="set another name in the job: name=my-run",
        )


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
    return _resource("instance group", group, zone, status, slice=str(described.get("slice") or ""), capacity=capacity)


def _instance(instance: Mapping[str, Any]) -> Resource:
    described = read_description(instance.get("description"))
    model = str((instance.get("scheduling") or {}).get("provisioningModel") or "STANDARD")
    slice_name = str(described.get("slice") or last_part(instance.get("machineType")))
    capacity = str(described.get("capacity") or _MODELS.get(model, model))
    zone, status = last_part(instance.get("zone")), instance_status(instance)
    return _resource("instance", instance, zone, status, slice=slice_name, capacity=capacity)


def _other(kind: str, resource: Mapping[str, Any], *, costs_money: bool = False) -> Resource:
    """Return a disk, template or policy. The zone is that of its slice, as `delete` needs it."""
    described = read_description(resource.get("description"))
    region = last_part(resource.get("region"))
    zone = last_part(resource.get("zone")) or str(described.get("zone") or f"{region}-a")
    status = SliceStatus(SliceState.STOPPED, str(resource.get("status") or ""))
    return _resource(kind, resource, zone, status, costs_money=costs_money)


def _resource(kind: str, resource: Mapping[str, Any], zone: str, status: SliceStatus, **values: Any) -> Resource:
    return Resource(
        provider=NAME,
        kind=kind,
        name=str(resource.get("name")),
        zone=zone,
        status=status,
        labels=labels_of(resource),
        metadata=metadata_of(resource),
        created_at=seconds_of(resource.get("creationTimestamp")),
        **values,
    )
