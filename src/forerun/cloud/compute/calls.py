"""Reads, deletions and operations of Compute Engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import read_description, region_of
from forerun.cloud.compute.states import last_part, pending_insertions
from forerun.cloud.google.answer_shape import (
    AggregatedPage,
    ComputeOperation,
    DiskPage,
    GuestAttributes,
    InstancePage,
    ManagedInstances,
    NamedResource,
    OperationPage,
)
from forerun.cloud.google.api_error import ApiError, operation_error, problem
from forerun.cloud.google.rest import PollPauses, Rest

LABELLED = f"labels.{cloud_labels.RUN}:*"  # the filter of resources that have the label of a run
_NOT_YET = ("resourceInUseByAnotherResource", "resourceNotReady")


class ComputeCalls:
    """Calls of Compute Engine in one project. Names of resources are those of `forerun.cloud.labels`."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest

    def zone_path(self, zone: str) -> str:
        return f"projects/{self.rest.project}/zones/{zone}"

    def region_path(self, zone: str) -> str:
        return f"projects/{self.rest.project}/regions/{region_of(zone)}"

    def find(self, path: str, shape: Any = NamedResource) -> dict[str, Any] | None:
        """Return a resource of a shape, or None if it does not exist."""
        try:
            return self.rest.call("GET", "compute", path, shape=shape)
        except ApiError as error:
            if _is_absent(error):
                return None
            raise problem(error, self.rest.project) from error

    def items(self, path: str, filter: str, shape: Any) -> list[dict[str, Any]]:
        """Return the items of a list, from all pages."""
        try:
            pages = list(self.rest.pages("compute", path, {"filter": filter}, shape))
        except ApiError as error:
            if _is_absent(error):
                return []
            raise problem(error, self.rest.project) from error
        return [item for page in pages for item in page.get("items") or ()]

    def everywhere(self, kind: str, filter: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the resources of a kind in all zones and regions, and the zones and regions that did not answer."""
        path = f"projects/{self.rest.project}/aggregated/{kind}"
        found: list[dict[str, Any]] = []
        missing: list[str] = []
        try:
            params = {"filter": filter, "returnPartialSuccess": "true"}
            for page in self.rest.pages("compute", path, params, AggregatedPage):
                missing += [last_part(place) for place in page.get("unreachables") or ()]
                for place, scope in (page.get("items") or {}).items():
                    found += scope.get(kind) or ()
                    if (scope.get("warning") or {}).get("code") == "UNREACHABLE":
                        missing.append(last_part(place))
        except ApiError as error:
            raise problem(error, self.rest.project) from error
        return found, missing

    def delete(self, path: str) -> dict[str, Any] | None:
        """Delete a resource and return the operation, or None if the resource does not exist or is in use."""
        try:
            return self.rest.call("DELETE", "compute", path, shape=ComputeOperation)
        except ApiError as error:
            if _is_absent(error) or error.reason in _NOT_YET:
                return None
            raise problem(error, self.rest.project) from error

    def wait(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an operation when it is done.

        Raises:
          ApiError: The operation failed.
          CloudUnavailable: It is not done after several minutes.
        """
        found = dict(operation)
        pauses = PollPauses(self.rest, f"the operation {found.get('name')}")
        while found.get("status") != "DONE":
            pauses.pause()
            found = self.rest.call("GET", "compute", self._operation_path(found), shape=ComputeOperation)
        if found.get("error"):
            raise operation_error(found["error"])
        return found

    def members(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the instances of a slice, in the order of their names."""
        found = self.items(f"{self.zone_path(zone)}/instances", LABELLED, InstancePage)
        return sorted((one for one in found if belongs_to(one, name)), key=lambda one: str(one.get("name")))

    def operations(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the operations on the instances and the instance group of a slice."""
        pattern = f".*/(instances|instanceGroupManagers)/{name}(-[0-9]+)?"
        return self._operations(f"{self.zone_path(zone)}/operations", pattern)

    def is_creating(self, name: str, zone: str) -> bool:
        """Return whether an insertion has not ended. Its resource may appear later."""
        pattern = f".*/(instanceTemplates|resourcePolicies)/{name}"
        regional = self._operations(f"{self.region_path(zone)}/operations", pattern)
        return bool(pending_insertions(self.operations(name, zone) + regional))

    def managed(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the entries of an instance group, also of machines that do not exist yet."""
        path = f"{self.zone_path(zone)}/instanceGroupManagers/{name}/listManagedInstances"
        try:
            answer = self.rest.call("POST", "compute", path, shape=ManagedInstances)
            return list(answer.get("managedInstances") or [])
        except ApiError as error:
            if _is_absent(error):
                return []
            raise problem(error, self.rest.project) from error

    def existing(self, name: str, zone: str) -> Iterator[tuple[str, list[str]]]:
        """Yield what exists of a slice, as (kind, paths), in the order in which it can be deleted.

        A group deletes its machines, and recreates those that are deleted before it. Templates and policies cannot be
        deleted while a group uses them.
        """
        here, region = self.zone_path(zone), self.region_path(zone)
        yield "instance group", self._found([f"{here}/instanceGroupManagers/{name}"])
        yield "instance", [f"{here}/instances/{one['name']}" for one in self.members(name, zone)]
        disks = self.items(f"{here}/disks", LABELLED, DiskPage)
        yield "disk", [f"{here}/disks/{one['name']}" for one in disks if belongs_to(one, name)]
        yield "template", self._found([f"{region}/instanceTemplates/{name}"])
        yield "policy", self._found([f"{region}/resourcePolicies/{name}"])

    def host_keys(self, instance: str, zone: str) -> list[str]:
        """Return the ssh host keys that the guest agent of an instance has reported."""
        path = f"{self.zone_path(zone)}/instances/{instance}/getGuestAttributes"
        try:
            found = self.rest.call("GET", "compute", path, params={"queryPath": "hostkeys/"}, shape=GuestAttributes)
        except ApiError as error:
            # The attributes do not exist before the guest agent writes them.
            if _is_absent(error):
                return []
            raise problem(error, self.rest.project) from error
        items = (found.get("queryValue") or {}).get("items") or []
        keys = [f"{one['key']} {one['value']}" for one in items if one.get("key") and one.get("value")]
        return sorted(keys, key=lambda key: not key.startswith("ssh-ed25519"))

    def _operations(self, path: str, pattern: str) -> list[dict[str, Any]]:
        found = self.items(path, f'targetLink eq "{pattern}"', OperationPage)
        return [one for one in found if re.fullmatch(pattern, str(one.get("targetLink") or ""))]

    def _found(self, paths: Sequence[str]) -> list[str]:
        return [path for path in paths if self.find(path) is not None]

    def _operation_path(self, operation: Mapping[str, Any]) -> str:
        for scope in ("zone", "region"):
            if operation.get(scope):
                place = f"{scope}s/{last_part(operation[scope])}"
                return f"projects/{self.rest.project}/{place}/operations/{operation['name']}"
        return f"projects/{self.rest.project}/global/operations/{operation['name']}"


def _is_absent(error: ApiError) -> bool:
    """Return whether a resource does not exist, or its zone does not exist: then it has nothing either."""
    return error.is_absent or (error.status == 400 and "unknown zone" in error.message.lower())


def belongs_to(resource: Mapping[str, Any], name: str) -> bool:
    """Return whether an instance or disk belongs to the slice with a name.

    The labels decide for the machines of a group. Their names are not enough: the run `a-1` may have the same ones.
    """
    if resource.get("name") == name:
        return True
    found = labels_of(resource)
    run, attempt = found.get(cloud_labels.RUN, ""), found.get(cloud_labels.ATTEMPT, "")
    if found.get(cloud_labels.ROLE) == cloud_labels.KEEPER_ROLE:
        return False
    return bool(run and attempt) and f"{cloud_labels.PREFIX}-{run}-{attempt}" == name


def labels_of(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a resource, from its description if its kind has no labels."""
    labels = resource.get("labels") or read_description(resource.get("description")).get("labels") or {}
    return {str(key): str(value) for key, value in labels.items()}


def metadata_of(instance: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an instance, or the part of it in the description of another resource."""
    items = (instance.get("metadata") or {}).get("items") or []
    found = {str(one.get("key")): str(one.get("value") or "") for one in items}
    described = read_description(instance.get("description")).get("metadata") or {}
    return {**described, **found}
