"""Reads, deletions and operations of Compute Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forerun.cloud import labels as cloud_labels
from forerun.cloud.compute.bodies import read_description, region_of
from forerun.cloud.compute.states import last_part
from forerun.cloud.google.api_error import ApiError, operation_error
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import CloudUnavailable

LABELLED = f"labels.{cloud_labels.RUN}:*"  # the filter of resources that have the label of a run
_POLLS = 240
_LONGEST_PAUSE_SECONDS = 5.0


class ComputeCalls:
    """Calls of Compute Engine in one project. Names of resources are those of `forerun.cloud.labels`."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest

    def zone_path(self, zone: str) -> str:
        return f"projects/{self.rest.project}/zones/{zone}"

    def region_path(self, zone: str) -> str:
        return f"projects/{self.rest.project}/regions/{region_of(zone)}"

    def find(self, path: str) -> dict[str, Any] | None:
        """Return a resource, or None if it does not exist."""
        try:
            return self.rest.call("GET", "compute", path)
        except ApiError as error:
            if error.is_absent:
                return None
            raise

    def items(self, path: str, filter: str = "") -> list[dict[str, Any]]:
        """Return the items of a list, or of an aggregated list, from all pages."""
        found: list[dict[str, Any]] = []
        for page in self.rest.pages("compute", path, {"filter": filter} if filter else None):
            items = page.get("items") or []
            if isinstance(items, Mapping):  # an aggregated list: {scope: {kind: [...]}}
                scopes = [scope.values() for scope in items.values() if isinstance(scope, Mapping)]
                found += [item for scope in scopes for kind in scope if isinstance(kind, list) for item in kind]
            else:
                found += items
        return found

    def delete(self, path: str) -> dict[str, Any] | None:
        """Delete a resource and return the operation, or None if the resource does not exist."""
        try:
            return self.rest.call("DELETE", "compute", path)
        except ApiError as error:
            if error.is_absent:
                return None
            raise

    def wait(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an operation when it is done.

        Raises:
          ApiError: The operation failed.
          CloudUnavailable: It is not done after several minutes.
        """
        found = dict(operation)
        for poll in range(_POLLS):
            if found.get("status") == "DONE":
                if found.get("error"):
                    raise operation_error(found["error"])
                return found
            self.rest.sleep(min(0.25 * 2.0**poll, _LONGEST_PAUSE_SECONDS))
            found = self.rest.call("GET", "compute", self._operation_path(found))
        raise CloudUnavailable(f"the operation {found.get('name')} is not done after {_POLLS} checks")

    def members(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the instances of a slice, in the order of their names."""
        found = self.items(f"{self.zone_path(zone)}/instances", LABELLED)
        return sorted((one for one in found if belongs_to(one, name)), key=lambda one: str(one.get("name")))

    def operations(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the operations on the instance or instance group with a name."""
        pattern = f'targetLink eq ".*/(instances|instanceGroupManagers)/{name}"'
        found = self.items(f"{self.zone_path(zone)}/operations", pattern)
        return [one for one in found if last_part(one.get("targetLink")) == name]

    def managed(self, name: str, zone: str) -> list[dict[str, Any]]:
        """Return the entries of an instance group, also of machines that do not exist yet."""
        path = f"{self.zone_path(zone)}/instanceGroupManagers/{name}/listManagedInstances"
        return list(self.rest.call("POST", "compute", path).get("managedInstances") or [])

    def existing(self, name: str, zone: str) -> Iterator[tuple[str, list[str]]]:
        """Yield what exists of a slice, as (kind, paths), in the order in which it can be deleted.

        A group deletes its machines, and recreates those that are deleted before it. Templates and policies cannot be
        deleted while a group uses them.
        """
        here, region = self.zone_path(zone), self.region_path(zone)
        yield "instance group", self._found([f"{here}/instanceGroupManagers/{name}"])
        yield "instance", [f"{here}/instances/{one['name']}" for one in self.members(name, zone)]
        disks = self.items(f"{here}/disks", LABELLED)
        yield "disk", [f"{here}/disks/{one['name']}" for one in disks if belongs_to(one, name)]
        yield "template", self._found([f"{region}/instanceTemplates/{name}"])
        yield "policy", self._found([f"{region}/resourcePolicies/{name}"])

    def host_keys(self, instance: str, zone: str) -> list[str]:
        """Return the ssh host keys that the guest agent of an instance has reported."""
        path = f"{self.zone_path(zone)}/instances/{instance}/getGuestAttributes"
        try:
            found = self.rest.call("GET", "compute", path, params={"queryPath": "hostkeys/"})
        except ApiError as error:
            # The attributes do not exist before the guest agent writes them.
            if error.is_absent:
                return []
            raise
        items = (found.get("queryValue") or {}).get("items") or []
        keys = [f"{one['key']} {one['value']}" for one in items if one.get("key") and one.get("value")]
        return sorted(keys, key=lambda key: not key.startswith("ssh-ed25519"))

    def _found(self, paths: Sequence[str]) -> list[str]:
        return [path for path in paths if self.find(path) is not None]

    def _operation_path(self, operation: Mapping[str, Any]) -> str:
        for scope in ("zone", "region"):
            if operation.get(scope):
                place = f"{scope}s/{last_part(operation[scope])}"
                return f"projects/{self.rest.project}/{place}/operations/{operation['name']}"
        return f"projects/{self.rest.project}/global/operations/{operation['name']}"


def belongs_to(resource: Mapping[str, Any], name: str) -> bool:
    """Return whether an instance or disk belongs to the slice with a name.

    The labels decide for the machines of a group. Their names are not enough: the run `a-1` may have the same ones.
    """
    if resource.get("name") == name:
        return True
    found = labels_of(resource)
    run, attempt = found.get(cloud_labels.RUN, ""), found.get(cloud_labels.ATTEMPT, "")
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
