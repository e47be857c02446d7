"""The provider of Compute Engine: TPU slices of v5p, v6e and tpu7x, GPU machines, and the keeper's small machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import ComputeCall, creation_calls, read_description
from forerun.cloud.compute.calls import ComputeCalls, Pauses, metadata_of
from forerun.cloud.compute.compute_answers import ComputeOperation, ComputeResource, Instance, InstanceGroup
from forerun.cloud.compute.inventory import resources
from forerun.cloud.compute.states import (
    absent_status,
    ended_at,
    failure_of,
    group_status,
    instance_status,
    is_on_instance,
)
from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import (
    Failure,
    HostAddress,
    NameTaken,
    RequestRefused,
    Resource,
    SliceRequest,
    SliceStatus,
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
        pauses = Pauses(self.rest, f"the deletion of {name} in {zone}")
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
