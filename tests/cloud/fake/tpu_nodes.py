"""Nodes of the Cloud TPU API: their states, operations and errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from fake import tables
from fake.clock import timestamp
from fake.world import ApiFault, Rental, World, invalid, not_found

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
Json = dict[str, Any]
CODES = {"RESOURCE_EXHAUSTED": 8, "NOT_FOUND": 5, "INTERNAL": 13, "UNAVAILABLE": 14, "CANCELLED": 1}


class TpuOperations:
    """The long-running operations of the Cloud TPU API."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.operations: dict[str, Json] = {}
        self.by_request: dict[tuple[str, str, str], str] = {}
        self._numbers = itertools.count(1)

    def begin(self, parent: str, verb: str, target: str, version: str) -> str:
        name = f"{parent}/operations/operation-{next(self._numbers):06}"
        metadata = {
            "@type": "type.googleapis.com/google.cloud.common.OperationMetadata",
            "createTime": timestamp(self.world.now()),
            "target": target,
            "verb": verb,
            "cancelRequested": False,
            "apiVersion": version,
        }
        self.operations[name] = {"name": name, "metadata": metadata, "done": False}
        return name

    def finish(self, name: str, response: Json | None = None, error: tuple[str, str] | None = None) -> None:
        operation = self.operations[name]
        if operation["done"]:
            return
        operation["metadata"]["endTime"] = timestamp(self.world.now())
        operation["done"] = True
        if error is not None:
            operation["error"] = {"code": CODES[error[0]], "message": error[1]}
        else:
            operation["response"] = response or {"@type": "type.googleapis.com/google.protobuf.Empty"}

    def get(self, name: str) -> Json:
        if name not in self.operations:
            raise not_found(name)
        return self.operations[name]

    def repeated(self, method: str, parent: str, request_id: str | None) -> Json | None:
        """Return the operation of an earlier request with the same UUID."""
        found = self.by_request.get((method, parent, request_id or ""))
        return None if request_id is None or found is None else self.operations[found]

    def remember(self, method: str, parent: str, request_id: str | None, operation: str) -> None:
        if request_id is not None:
            self.by_request[method, parent, request_id] = operation


class TpuNodes:
    """The nodes. A node is a dictionary as the API returns it; `rentals` has its machines."""

    def __init__(self, world: World, operations: TpuOperations) -> None:
        self.world, self.operations = world, operations
        self.nodes: dict[str, Json] = {}
        self.rentals: dict[str, Rental] = {}
        self.listeners: list[Callable[[str], None]] = []
        self._ids = itertools.count(4_000_000_000_000_000_001, 7919)
        world.quota_users.append(self.quota_used)
        world.when_preempted.append(self._preempted)

    def create(self, parent: str, node_id: str, body: Json, version: str, request_id: str | None = None) -> Json:
        repeated = self.operations.repeated("nodes.create", parent, request_id)
        if repeated is not None:
            return repeated
        self.check(parent, node_id, body)
        self.check_quota(parent, body, spot=is_spot(body))
        name = f"{parent}/nodes/{node_id}"
        operation = self.operations.begin(parent, "create", name, version)
        self.operations.remember("nodes.create", parent, request_id, operation)
        self.add(parent, node_id, body, version, operation)
        return dict(self.operations.get(operation))

    def check(self, parent: str, node_id: str, body: Json) -> None:
        """Raise what the API answers to a request that can never succeed."""
        zone = parent.split("/")[3]
        if not NAME.fullmatch(node_id):
            raise invalid(f"Invalid resource name '{node_id}': it must match {NAME.pattern}")
        if f"{parent}/nodes/{node_id}" in self.nodes:
            raise ApiFault(409, "ALREADY_EXISTS", f"Resource '{parent}/nodes/{node_id}' already exists")
        wanted = shape_of(body)
        if wanted is None or wanted.generation == "tpu7x":
            raise invalid(
                f"invalid AcceleratorType: {body.get('acceleratorType')}. Valid values are: "
                + ", ".join(sorted({one.api_name for one in tables.shapes().values() if one.generation != "tpu7x"}))
            )
        if zone not in tables.all_zones() or zone not in tables.zones(wanted.generation):
            raise ApiFault(
                403,
                "PERMISSION_DENIED",
                f"Permission denied on 'locations/{zone}' for {wanted.api_name} (or it may not exist).",
            )
        runtimes = {*tables.RUNTIMES.values(), *self.world.settings.get("runtimes", ())}
        if body.get("runtimeVersion") not in runtimes:
            raise invalid(f"Invalid runtimeVersion '{body.get('runtimeVersion')}'")
        for key, value in body.get("labels", {}).items():
            if not LABEL.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
                raise invalid(f"Invalid label '{key}={value}'")

    def check_quota(self, parent: str, body: Json, *, spot: bool) -> None:
        zone, wanted = parent.split("/")[3], shape_of(body)
        assert wanted is not None
        left = self.world.quota_left(zone, wanted.generation, spot=spot)
        if left is not None and left < wanted.chips:
            limit = self.world.quota[zone, wanted.generation, spot]
            kind = f"TPU{wanted.generation.upper()}{'Preemptible' if spot else ''}PerProjectPerZoneForTPUAPI"
            message = f"Quota limit '{kind}' has been exceeded. Limit: {limit} in zone {zone}."
            raise ApiFault(429, "RESOURCE_EXHAUSTED", message, "RATE_LIMIT_EXCEEDED")

    def add(
        self,
        parent: str,
        node_id: str,
        body: Json,
        version: str,
        operation: str | None,
        queued: str = "",
        *,
        spot: bool | None = None,
    ) -> None:
        """Create a node that is complete after the delay, or whose operation ends with code 8."""
        zone, wanted = parent.split("/")[3], shape_of(body)
        assert wanted is not None
        name = f"{parent}/nodes/{node_id}"
        network = {"network": "default", "subnetwork": "default"} | body.get("networkConfig", {})
        account = {"scope": ["https://www.googleapis.com/auth/cloud-platform"]} | body.get("serviceAccount", {})
        node = body | {
            "name": name,
            "id": str(next(self._ids)),
            "state": "CREATING",
            "createTime": timestamp(self.world.now()),
            "apiVersion": "V2" if version == "v2" else "V2_ALPHA1",
            "acceleratorType": wanted.api_name,
            "acceleratorConfig": {
                "type": wanted.generation.upper().replace("V5E", "V5LITE_POD"),
                "topology": wanted.topology,
            },
            "networkConfig": {key: full_name(parent, zone, key, value) for key, value in network.items()},
            "serviceAccount": {"email": "123456-compute@developer.gserviceaccount.com"} | account,
        }
        if queued:
            node["queuedResource"] = queued
        self.nodes[name] = node
        low = is_spot(body) if spot is None else spot
        price = tables.usd_per_hour(wanted, zone, spot=low)
        assert price is not None
        rental = Rental(
            node_id,
            zone,
            wanted.name,
            wanted.hosts,
            wanted.chips,
            price,
            low,
            dict(body.get("metadata", {})),
            self.world.now(),
        )
        rental.external = bool(network.get("enableExternalIps"))

        def ready(at: float) -> None:
            if self.nodes.get(name) is node and node["state"] == "CREATING":
                node.update(state="READY", health="HEALTHY", networkEndpoints=self.endpoints(rental))
                self._changed(name)
                if operation:
                    self.operations.finish(
                        operation, {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.Node"} | node
                    )

        def broken(why: str) -> None:
            node["state"] = "UNKNOWN"
            if operation:
                self.operations.finish(operation, error=("INTERNAL", why))

        def begin() -> None:
            if self.nodes.get(name) is not node or node["state"] != "CREATING":
                return  # deleted in the meantime
            if not queued and not self.world.free_capacity(zone, wanted.name):
                del self.nodes[name]
                if operation:
                    text = f'There is no more capacity in the zone "{zone}"; you can try in another zone'
                    self.operations.finish(
                        operation, error=("RESOURCE_EXHAUSTED", f"{text} (accelerator type {wanted.api_name}).")
                    )
                return
            self.rentals[name] = rental
            self.world.rent(rental, ready, broken)

        self.world.after(self.world.delays.create, begin)

    def endpoints(self, rental: Rental) -> list[Json]:
        found = []
        for external, internal in self.world.machines.addresses(rental.name):
            access = {"accessConfig": {"externalIp": external}} if rental.external else {}
            found.append({"ipAddress": internal, "port": 8470, **access})
        return found

    def get(self, name: str) -> Json:
        if name not in self.nodes:
            raise not_found(name)
        return self.nodes[name]

    def list(self, parent: str) -> list[Json]:
        project, zone = parent.split("/")[1], parent.split("/")[3]
        return [
            node
            for name, node in sorted(self.nodes.items())
            if name.split("/")[1] == project and zone in ("-", name.split("/")[3])
        ]

    def delete(self, name: str, version: str, request_id: str | None = None) -> Json:
        parent = name.rsplit("/nodes/", 1)[0]
        repeated = self.operations.repeated("nodes.delete", parent, request_id)
        if repeated is not None:
            return repeated
        self.get(name)
        operation = self.operations.begin(parent, "delete", name, version)
        self.operations.remember("nodes.delete", parent, request_id, operation)
        self.remove(name, lambda: self.operations.finish(operation))
        return dict(self.operations.get(operation))

    def remove(self, name: str, done: Callable[[], None]) -> None:
        """Begin the deletion. Billing ends when it is complete, at the end time of the operation."""
        node = self.nodes[name]
        node["state"] = "DELETING"

        def gone() -> None:
            if self.nodes.get(name) is node:
                del self.nodes[name]
            if name in self.rentals:
                self.world.end(self.rentals.pop(name))
            self._changed(name)
            done()

        self.world.after(self.world.delays.delete, gone)

    def _changed(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)

    def _preempted(self, rental: Rental) -> None:
        for name, mine in self.rentals.items():
            if mine is rental:
                self.nodes[name].update(state=self.world.settings.get("preempted_state", "PREEMPTED"))
                self.nodes[name].pop("health", None)

    def quota_used(self) -> list[tuple[str, str, bool, int]]:
        """Return what each node uses: a preempted one uses its quota until it is deleted."""
        used = []
        for name, node in self.nodes.items():
            wanted = shape_of(node)
            if wanted is not None and not node.get("queuedResource"):
                used.append((name.split("/")[3], wanted.generation, is_spot(node), wanted.chips))
        return used


def is_spot(node: Json) -> bool:
    scheduling = node.get("schedulingConfig", {})
    return bool(scheduling.get("spot") or scheduling.get("preemptible"))


def shape_of(node: Json) -> tables.SliceShape | None:
    config = node.get("acceleratorConfig")
    if not node.get("acceleratorType") and config:
        return tables.shape_with(config["type"].lower().replace("v5lite_pod", "v5e"), config.get("topology", ""))
    found = tables.shapes().get(node.get("acceleratorType", ""))
    return None if found is None or found.api_name != node.get("acceleratorType") else found


def full_name(parent: str, zone: str, key: str, value: Any) -> Any:
    project = parent.split("/")[1]
    if key == "network" and "/" not in value:
        return f"projects/{project}/global/networks/{value}"
    if key == "subnetwork" and "/" not in value:
        return f"projects/{project}/regions/{zone.rsplit('-', 1)[0]}/subnetworks/{value}"
    return value
