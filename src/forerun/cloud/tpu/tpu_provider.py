"""Slices of the Cloud TPU API as a `Provider`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.cloud import labels
from forerun.cloud.google.answer_shape import NODES, PAGES, QUEUE, RESOURCES, HostAttributes, Operation
from forerun.cloud.google.api_error import ApiError, classify, problem, refusal
from forerun.cloud.google.clock import seconds_of
from forerun.cloud.google.rest import PollPauses, Rest
from forerun.cloud.provider import (
    CloudUnavailable,
    Failure,
    HostAddress,
    Resource,
    SliceRequest,
    SliceState,
    SliceStatus,
    ZonesUnreachable,
)
from forerun.cloud.tpu.node_request import STABLE, create_request, location, slice_of
from forerun.cloud.tpu.slice_states import is_spot, labels_of, node_of, node_status, queue_status
from forerun.cloud.tpu.tpu_operations import (
    creation_runs,
    end_of,
    error_in,
    newest,
    operations_on,
    target_of,
    time_of,
    verb_of,
    wait_for,
)

Json = Mapping[str, Any]


class TpuProvider:
    """The Cloud TPU API, v2 and v2alpha1.

    On demand, a slice is a node. Otherwise it is a queued resource whose node has the same name.
    """

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self._ready: dict[tuple[str, str], float] = {}

    @property
    def name(self) -> str:
        return "tpu"

    def now(self) -> float:
        return self.rest.now()

    def enforces_limit(self, request: SliceRequest) -> bool:
        """Return True only for flex-start: the API has no limit for the other kinds."""
        return request.capacity == "flex-start" and request.limit_seconds is not None

    def create(self, request: SliceRequest) -> None:
        wanted = create_request(request, self.rest.project)
        try:
            operation = self.rest.call("POST", "tpu", wanted.path, wanted.body, wanted.params, Operation)
        except ApiError as error:
            if error.is_duplicate:
                return
            raise refusal(error) from error
        error_inside = error_in(operation)
        if error_inside is not None and not error_inside.is_duplicate:
            raise refusal(error_inside)

    def requests(self, request: SliceRequest) -> Sequence[Mapping[str, object]]:
        wanted = create_request(request, self.rest.project)
        return [self.rest.description("POST", "tpu", wanted.path, wanted.body, wanted.params)]

    def status(self, name: str, zone: str) -> SliceStatus:
        queued, node = self._get(QUEUE, name, zone), self._get(NODES, name, zone)
        if queued is not None:
            return queue_status(queued, node, ready_at=self._ready_at(name, zone, node))
        if node is not None:
            return node_status(node, spot=is_spot(node), ready_at=self._ready_at(name, zone, node))
        return self._absent_status(name, zone)

    def _absent_status(self, name: str, zone: str) -> SliceStatus:
        """Return why there is neither a node nor a queued resource: the reason may be inside an operation."""
        operations = self._operations(name, zone)
        if creation_runs(operations):
            return SliceStatus(SliceState.CREATING, "the operation has not ended")
        last = newest(operations, "create", "delete")
        error = error_in(last) if last is not None and verb_of(last) == "create" else None
        if error is not None and last is not None:
            return SliceStatus(SliceState.FAILED, error.message, classify(error), ended_at=time_of(last, "endTime"))
        # A slice that the host itself deleted leaves only operations. They tell how long it was billed.
        ready_at = end_of(newest(_on_node(operations, name), "create"))
        return SliceStatus(SliceState.ABSENT, ready_at=ready_at, ended_at=_billing_end(operations, name))

    def delete(self, name: str, zone: str) -> float | None:
        """Delete the queued resource with its node, or the node. Return when both are absent.

        The time is None for machines that the cloud had taken before: the API does not tell when.
        """
        lost = False
        pauses = PollPauses(self.rest, f"the deletion of {name} in {zone}")
        while True:
            queued, node = self._get(QUEUE, name, zone), self._get(NODES, name, zone)
            lost = lost or self._is_lost(queued, node)
            deleted = False
            if queued is not None:
                if (queued.get("state") or {}).get("state") != "DELETING":
                    deleted = self._delete_one(QUEUE, name, zone, {"force": "true"})
            elif node is not None:
                if node.get("state") != "DELETING":
                    deleted = self._delete_one(NODES, name, zone, None)
            else:
                operations = self._operations(name, zone)
                if not creation_runs(operations):
                    self._ready.pop((name, zone), None)
                    return None if lost else _billing_end(operations, name)
            if not deleted:
                pauses.pause()

    @staticmethod
    def _is_lost(queued: Json | None, node: Json | None) -> bool:
        """Return whether billing has ended before the deletion."""
        if queued is None and node is None:
            return False
        status = queue_status(queued, node) if queued is not None else node_status(node or {}, spot=is_spot(node or {}))
        return status.state in (SliceState.PREEMPTED, SliceState.STOPPED, SliceState.FAILED)

    def _delete_one(self, kind: str, name: str, zone: str, params: Mapping[str, str] | None) -> bool:
        """Delete one resource. Return False if the API refuses it now, such as while it is being created."""
        try:
            path = self._path(kind, name, zone)
            wait_for(self.rest, self.rest.call("DELETE", "tpu", path, params=params, shape=Operation))
        except ApiError as error:
            if classify(error) is Failure.PERMISSION:
                raise problem(error, self.rest.project) from error
            return error.is_absent
        return True

    def list(self) -> Sequence[Resource]:
        nodes, queue = list_everywhere(self.rest, NODES), list_everywhere(self.rest, QUEUE)
        by_name = {_place(node): node for node in nodes.items}
        found = [self._resource("node", node, node_status(node, spot=is_spot(node))) for node in nodes.items]
        found += [
            self._resource("queued resource", queued, queue_status(queued, by_name.get(_place(queued))))
            for queued in queue.items
        ]
        own = [resource for resource in found if labels.RUN in resource.labels]
        unreachable = sorted({*nodes.unreachable, *queue.unreachable})
        if unreachable:
            raise ZonesUnreachable(unreachable, own)
        return own

    def _resource(self, kind: str, found: Json, status: SliceStatus) -> Resource:
        zone, name = _place(found)
        node = node_of(found)
        own = labels_of(found)
        return Resource(
            provider=self.name,
            kind=kind,
            name=name,
            zone=zone,
            status=status,
            labels=own,
            metadata={str(key): str(value) for key, value in (node.get("metadata") or {}).items()},
            slice=slice_of(node),
            capacity=own.get(labels.CAPACITY, "spot" if is_spot(found) else "on-demand"),
            created_at=seconds_of(found.get("createTime")),
            costs_money=kind == "node",
        )

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        hosts = self._hosts(name, zone)
        if not hosts:
            return []
        # The machines are not in the user's project. Only their guest attributes have the names that a tunnel needs.
        names = [_attribute(attributes, "hostname") for attributes in self._guest_attributes(name, zone)]
        if len(names) != len(hosts):
            return hosts
        return [dataclasses.replace(host, instance=instance) for host, instance in zip(hosts, names, strict=True)]

    def _hosts(self, name: str, zone: str) -> Sequence[HostAddress]:
        node = self._get(NODES, name, zone) or {}
        hosts = []
        for index, endpoint in enumerate(node.get("networkEndpoints") or ()):
            internal = str(endpoint.get("ipAddress") or "")
            external = str((endpoint.get("accessConfig") or {}).get("externalIp") or "")
            hosts.append(HostAddress(index, external or internal, internal))
        return hosts

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        """Return the keys that the hosts have written to their guest attributes; none before all have."""
        found = [_keys(attributes) for attributes in self._guest_attributes(name, zone)]
        hosts = len(self._hosts(name, zone))
        return found if hosts and len(found) == hosts and all(found) else []

    def _guest_attributes(self, name: str, zone: str) -> Sequence[Json]:
        path = f"{self._path(NODES, name, zone)}:getGuestAttributes"
        try:
            answer = self.rest.call("POST", "tpu", path, {"workerIds": [""]}, shape=HostAttributes)
        except ApiError as error:
            if classify(error) is Failure.PERMISSION:
                raise problem(error, self.rest.project) from error
            return []  # the hosts have not started yet
        attributes: Sequence[Json] = answer.get("guestAttributes") or ()
        return attributes

    def _ready_at(self, name: str, zone: str, node: Json | None) -> float | None:
        """Return since when a node is billed.

        The end of the creation tells it. The API may have no such operation for a node from the queue. Then the node's
        creation time is used, which is a little earlier: a cost is never too low.
        """
        if node is None:
            return self._ready.get((name, zone))
        if (name, zone) not in self._ready and node.get("state") not in (None, "", "CREATING", "STARTING"):
            created = newest(operations_on(self.rest, zone, (f"{zone}/{NODES}/{name}",)), "create")
            ready_at = end_of(created) or seconds_of(node.get("createTime"))
            if ready_at is not None:
                self._ready[name, zone] = ready_at
        return self._ready.get((name, zone))

    def _operations(self, name: str, zone: str) -> Sequence[Json]:
        return operations_on(self.rest, zone, (f"{zone}/{NODES}/{name}", f"{zone}/{QUEUE}/{name}"))

    def _path(self, kind: str, name: str, zone: str) -> str:
        return f"{STABLE}/{location(self.rest.project, zone)}/{kind}/{name}"

    def _get(self, kind: str, name: str, zone: str) -> dict[str, Any] | None:
        try:
            return self.rest.call("GET", "tpu", self._path(kind, name, zone), shape=RESOURCES[kind])
        except ApiError as error:
            if error.is_absent or _is_unknown_zone(error):
                return None
            raise problem(error, self.rest.project) from error


def _place(resource: Json) -> tuple[str, str]:
    """Return (zone, name) of `projects/p/locations/zone/nodes/name`."""
    parts = str(resource.get("name") or "").split("/")
    return parts[-3] if len(parts) > 2 else "", parts[-1]


def _is_unknown_zone(error: ApiError) -> bool:
    """Return whether the zone does not exist for this API. Then nothing exists in it either."""
    return error.status == 403 and "locations/" in error.message and "may not exist" in error.message


def _items(attributes: Json) -> list[tuple[str, str]]:
    items = (attributes.get("queryValue") or {}).get("items") or ()
    return [(str(item.get("key") or ""), str(item.get("value") or "")) for item in items]


def _attribute(attributes: Json, name: str) -> str:
    return dict(_items(attributes)).get(name, "")


def _keys(attributes: Json) -> list[str]:
    keys = _items(attributes)
    return [f"{kind} {key}" for kind, key in keys if kind.startswith(("ssh-", "ecdsa-")) and key]


def _on_node(operations: Sequence[Json], name: str) -> Sequence[Json]:
    return [one for one in operations if target_of(one).endswith(f"/{NODES}/{name}")]


def _billing_end(operations: Sequence[Json], name: str) -> float | None:
    """Return when the node was deleted, or else when its queued resource was, if the API lists the operation.

    Deletions before the newest creation belong to an earlier slice with the same name.
    """
    created = newest(operations, "create")
    since = 0 if created is None else operations.index(created)
    own = operations[since:]
    return end_of(newest(_on_node(own, name), "delete")) or end_of(newest(own, "delete"))


@dataclass(frozen=True)
class Listing:
    """The resources of one kind, and the zones that did not answer."""

    items: Sequence[Mapping[str, Any]]
    unreachable: Sequence[str]


def list_everywhere(rest: Rest, kind: str) -> Listing:
    """Return all resources of a kind. A zone that the list omits is asked once more on its own."""
    items, missing = _list(rest, kind, "-")
    unreachable = []
    for zone in missing:
        try:
            more, still_missing = _list(rest, kind, zone)
        except CloudUnavailable:
            more, still_missing = [], [zone]
        items += more
        unreachable += still_missing
    return Listing(items, unreachable)


def _list(rest: Rest, kind: str, zone: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    items: list[Mapping[str, Any]] = []
    missing: list[str] = []
    try:
        for page in rest.pages("tpu", f"{STABLE}/{location(rest.project, zone)}/{kind}", shape=PAGES[kind]):
            items += page.get(kind) or ()
            missing += [str(name).split("/")[-1] for name in page.get("unreachable") or ()]
    except ApiError as error:
        raise problem(error, rest.project) from error
    return items, missing
