"""Instances and disks of Compute Engine: their states, limits and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from fake.clock import compute_timestamp, seconds_at
from fake.compute_machines import MachineKind, machine_kind, region_of
from fake.compute_store import Json, Store
from fake.tpu_nodes import LABEL, LABEL_VALUE, NAME
from fake.world import ApiFault, Rental, World

SHORTEST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS = 30, 120 * 86400
FLEX_START_SECONDS = 7 * 86400


class Instances:
    """Single instances, and the parts of an instance that groups need too."""

    def __init__(self, world: World, store: Store) -> None:
        self.world, self.store = world, store
        self.rentals: dict[str, Rental] = {}
        self.hosts: dict[str, tuple[str, int]] = {}  # path of an instance: name of its machines, index of its host
        self.preempt_listeners: list[Callable[[Rental], bool]] = []
        self._waiting: dict[str, Callable[[], None]] = {}
        world.when_preempted.append(self._preempted)
        world.when_capacity_changes.append(self._serve)

    # Requests

    def insert(self, project: str, zone: str, body: Json, request_id: str | None) -> Json:
        repeated = self.store.repeated("insert", request_id)
        if repeated is not None:
            return repeated
        name = body.get("name", "")
        path = f"projects/{project}/zones/{zone}/instances/{name}"
        kind = self.check(zone, name, body)
        item = self.add(path, body)
        where = self.store.begin(path, "insert", request_id)
        rental = self.rental(name, zone, kind, body)

        def fail(error: tuple[str, str, int]) -> None:
            self.forget(path)
            self.store.finish(where, error)

        def ready(at: float) -> None:
            if self.store.items.get(path) is item and item["status"] in ("PROVISIONING", "STAGING"):
                self.run(path, item, rental, 0)
                self.start_limit(item, at, lambda: self._limit(path, item))
                self.store.finish(where)

        def begin() -> None:
            if self.store.items.get(path) is not item:
                self.store.finish(where, ("RESOURCE_NOT_FOUND", f"{path} was deleted", 404))
                return
            error = self.refused(project, zone, kind, body)
            if error is not None and error[0].startswith("ZONE_RESOURCE") and is_flex_start(body):
                item["status"] = "PENDING"
                self._waiting[path] = begin
                return
            if error is not None:
                fail(error)
                return
            item["status"] = "STAGING"
            self.rentals[path] = rental
            self.world.rent(rental, ready, lambda why: fail(("INTERNAL_ERROR", why, 500)))

        self.world.after(self.world.delays.create, begin)
        if is_flex_start(body):
            valid = int(body.get("params", {}).get("requestValidForDuration", {}).get("seconds", 90))
            self.world.after(valid, lambda: self._expire(path, item, fail))
        return dict(self.store.items[where])

    def check(self, zone: str, name: str, body: Json, topology: str | None = None, count: int = 1) -> MachineKind:
        """Raise what the API answers to a request that can never succeed."""
        if not NAME.fullmatch(name):
            raise bad(f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex '{NAME.pattern}'")
        for key, value in body.get("labels", {}).items():
            if not LABEL.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
                raise bad(f"Invalid value for field 'resource.labels': '{key}={value}'")
        scheduling = body.get("scheduling", {})
        model, limit = scheduling.get("provisioningModel", "STANDARD"), limit_of(scheduling)
        if scheduling.get("preemptible") and model != "SPOT" and limit is not None:
            raise bad("Limited runtime is not supported for preemptible instances.")
        if limit is not None and not SHORTEST_LIMIT_SECONDS <= limit <= LONGEST_LIMIT_SECONDS:
            raise bad("Invalid value for field 'resource.scheduling.maxRunDuration': it must be 30 s to 120 days.")
        action = scheduling.get("instanceTerminationAction")
        if (limit is not None or "terminationTime" in scheduling) and action is None:
            raise bad("instanceTerminationAction must be set for an instance with a limited runtime.")
        if action is not None and model == "STANDARD" and limit is None and "terminationTime" not in scheduling:
            raise bad("instanceTerminationAction is not supported for instances without limited runtime.")
        if model == "FLEX_START" and (limit is None or limit > FLEX_START_SECONDS):
            raise bad("FLEX_START needs scheduling.maxRunDuration of at most 7 days.")
        if not body.get("disks") or not body.get("networkInterfaces"):
            raise bad("Invalid value for field 'resource': disks and networkInterfaces are required.")
        machine = body.get("machineType", "").rsplit("/", 1)[-1]
        if machine.startswith(("ct", "tpu", "a2", "a3", "g2")) and scheduling.get("onHostMaintenance") != "TERMINATE":
            raise bad("Instances with accelerators do not support live migration: onHostMaintenance must be TERMINATE.")
        prices = self.world.settings.get("machine_prices", {})
        kind = machine_kind(machine, zone, topology, count, spot=is_low_priority(body), prices=prices)
        if kind is None:
            place = f"projects/p/zones/{zone}/machineTypes/{machine}"
            raise bad(
                f"Invalid value for field 'resource.machineType': '{place}'. Machine type does not exist in zone."
            )
        return kind

    def refused(self, project: str, zone: str, kind: MachineKind, body: Json) -> tuple[str, str, int] | None:
        """Return the error of an operation without quota or capacity."""
        left = self.world.quota_left(zone, kind.generation, spot=is_low_priority(body))
        if left is not None and left < max(kind.chips, 1):
            limit = self.world.quota[zone, kind.generation, is_low_priority(body)]
            name = "PREEMPTIBLE_TPUS_PER_TPU_FAMILY" if is_low_priority(body) else "TPUS_PER_TPU_FAMILY"
            return "QUOTA_EXCEEDED", f"Quota '{name}' exceeded. Limit: {limit}.0 in region {region_of(zone)}.", 403
        if not self.world.free_capacity(zone, kind.slice):
            message = f"The zone 'projects/{project}/zones/{zone}' does not have enough resources available"
            return "ZONE_RESOURCE_POOL_EXHAUSTED", f"{message} to fulfill the request. '(resource type:compute)'.", 503
        return None

    def rental(self, name: str, zone: str, kind: MachineKind, body: Json) -> Rental:
        metadata = {one["key"]: one.get("value", "") for one in body.get("metadata", {}).get("items", [])}
        rental = Rental(
            name,
            zone,
            kind.slice,
            kind.hosts,
            kind.chips,
            kind.usd_per_hour,
            is_low_priority(body),
            metadata,
            self.world.now(),
        )
        rental.external = bool(body["networkInterfaces"][0].get("accessConfigs"))
        return rental

    def add(self, path: str, body: Json) -> Json:
        """Create an instance that is PROVISIONING, and its disks."""
        body = copy.deepcopy(body)  # the machines of a group have the properties of one template
        project, zone, name = path.split("/")[1], path.split("/")[3], path.rsplit("/", 1)[1]
        machine = body["machineType"].rsplit("/", 1)[-1]
        scheduling = {"automaticRestart": False, "preemptible": False, "provisioningModel": "STANDARD"}
        item = self.store.add(
            path,
            "instance",
            body
            | {
                "name": name,
                "status": "PROVISIONING",
                "machineType": self.store.link(f"projects/{project}/zones/{zone}/machineTypes/{machine}"),
                "scheduling": scheduling | body.get("scheduling", {}),
                "labelFingerprint": "42WmSpB8rSM=",
                "tags": {"fingerprint": "42WmSpB8rSM="} | body.get("tags", {}),
                "metadata": {"kind": "compute#metadata", "fingerprint": "42WmSpB8rSM="} | body.get("metadata", {}),
                "cpuPlatform": "Unknown CPU Platform",
            },
        )
        item.pop("params", None)
        region, prefix = region_of(zone), self.store.base
        item["networkInterfaces"] = [
            {"name": f"nic{index}", "network": f"{prefix}projects/{project}/global/networks/default"}
            | {"subnetwork": f"{prefix}projects/{project}/regions/{region}/subnetworks/default"}
            | one
            for index, one in enumerate(body["networkInterfaces"])
        ]
        item["disks"] = [self._disk(path, index, one) for index, one in enumerate(body["disks"])]
        return item

    def _disk(self, path: str, index: int, wanted: Json) -> Json:
        if "initializeParams" not in wanted:
            return {"index": index, "kind": "compute#attachedDisk"} | wanted
        project, zone, name = path.split("/")[1], path.split("/")[3], path.rsplit("/", 1)[1]
        settings = wanted["initializeParams"]
        disk = settings.get("diskName") or (name if index == 0 else f"{name}-{index}")
        where = f"projects/{project}/zones/{zone}/disks/{disk}"
        kept = {"name": disk, "status": "READY", "sizeGb": str(settings.get("diskSizeGb", 10))}
        kept |= {"labels": settings["labels"]} if "labels" in settings else {}
        self.store.add(where, "disk", kept | {"users": [self.store.link(path)]})
        rest = {key: value for key, value in wanted.items() if key != "initializeParams"}
        return {"kind": "compute#attachedDisk", "index": index, "source": self.store.link(where)} | rest

    # Changes

    def run(self, path: str, item: Json, rental: Rental, host: int) -> None:
        """Set an instance to RUNNING, with its addresses."""
        item.update(status="RUNNING", lastStartTimestamp=compute_timestamp(self.world.now()))
        self.hosts[path] = (rental.name, host)
        addresses = self.world.machines.addresses(rental.name)
        if host < len(addresses):
            external, internal = addresses[host]
            interface = item["networkInterfaces"][0]
            interface["networkIP"] = internal
            if interface.get("accessConfigs"):
                interface["accessConfigs"][0]["natIP"] = external

    def start_limit(self, item: Json, at: float, end: Callable[[], None]) -> None:
        limit = limit_of(item["scheduling"])
        if "terminationTime" in item["scheduling"]:
            limit = seconds_at(item["scheduling"]["terminationTime"]) - at
        if limit is not None:
            status = {"scheduling": {"terminationTimestamp": compute_timestamp(at + limit)}}
            item["resourceStatus"] = item.get("resourceStatus", {}) | status
            self.world.after(max(0.0, limit), end)

    def _limit(self, path: str, item: Json) -> None:
        if self.store.items.get(path) is item and item["status"] == "RUNNING":
            self.record_end(path)
            self.stop_or_forget(path, item)

    def stop_or_forget(self, path: str, item: Json, *, preempted: bool = False) -> None:
        """Do what `instanceTerminationAction` says."""
        rental = self.rentals.get(path)
        if rental is not None:
            # At a limit, the guest shuts down as after a stop: its processes get SIGTERM.
            self.world.end(rental, preempted=preempted, kill=preempted)
        if item["scheduling"].get("instanceTerminationAction") == "DELETE":
            self.forget(path)
        else:
            item.update(status="TERMINATED", lastStopTimestamp=compute_timestamp(self.world.now()))

    def forget(self, path: str) -> None:
        """Remove an instance, its machines, and the disks that are deleted with it."""
        item = self.store.items.pop(path, None)
        self._waiting.pop(path, None)
        self.hosts.pop(path, None)
        if path in self.rentals:
            self.world.end(self.rentals.pop(path))
        for disk in [] if item is None else item["disks"]:
            where = self.store.path_of(disk.get("source", ""))
            if disk.get("autoDelete"):
                self.store.items.pop(where, None)
            elif where in self.store.items:
                self.store.items[where].pop("users", None)

    def delete(self, path: str, request_id: str | None) -> Json:
        repeated = self.store.repeated("delete", request_id)
        if repeated is not None:
            return repeated
        item = self.store.get(path)
        where = self.store.begin(path, "delete", request_id)
        item["status"] = "STOPPING"

        def gone() -> None:
            if self.store.items.get(path) is item:
                self.forget(path)
            self.store.finish(where)

        self.world.after(self.world.delays.delete, gone)
        return dict(self.store.items[where])

    def stop(self, path: str) -> Json:
        item = self.store.get(path)
        where = self.store.begin(path, "stop")
        if path in self.rentals:
            self.world.end(self.rentals[path], kill=False)
        item.update(status="TERMINATED", lastStopTimestamp=compute_timestamp(self.world.now()))
        self.world.after(0, lambda: self.store.finish(where))
        return dict(self.store.items[where])

    def guest_attributes(self, path: str, query: str) -> Json:
        """Return the ssh host keys that the guest has published, if the metadata allows it to."""
        item = self.store.get(path)
        name, host = self.hosts.get(path, ("", 0))
        metadata = {one["key"]: one.get("value", "") for one in item["metadata"].get("items", [])}
        keys = self.world.machines.host_keys(name)
        allowed = metadata.get("enable-guest-attributes", "").upper() == "TRUE"
        if not allowed or host >= len(keys) or not "hostkeys/".startswith(query.rstrip("/")):
            raise ApiFault(
                404, "NOT_FOUND", f"The resource '{query}' of type 'Guest Attribute' was not found.", "notFound"
            )
        items = [{"namespace": "hostkeys", "key": one.split()[0], "value": one.split()[1]} for one in keys[host]]
        return {"kind": "compute#guestAttributes", "queryPath": query, "queryValue": {"items": items}}

    def _preempted(self, rental: Rental) -> None:
        if any(listener(rental) for listener in self.preempt_listeners):
            return
        for path, mine in list(self.rentals.items()):
            if mine is rental and path in self.store.items:
                self.record_preemption(path)
                self.stop_or_forget(path, self.store.items[path], preempted=True)

    def record_preemption(self, path: str) -> None:
        self.store.finish(self.store.begin(path, "compute.instances.preempted"))

    def record_end(self, path: str) -> None:
        """Record that the API ended an instance at its limit."""
        self.store.finish(self.store.begin(path, "delete"))

    def _serve(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for begin in waiting.values():
            begin()

    def _expire(self, path: str, item: Json, fail: Callable[[tuple[str, str, int]], None]) -> None:
        if self.store.items.get(path) is item and item["status"] == "PENDING":
            fail(("ZONE_RESOURCE_POOL_EXHAUSTED", "The request was not served within requestValidForDuration.", 503))

    def quota_used(self) -> list[tuple[str, str, bool, int]]:
        return [
            (one.zone, one.slice.split("-")[0], one.spot, max(one.chips, 1))
            for one in self.world.rentals
            if one.ended_at is None and any(one is mine for mine in self.rentals.values())
        ]


def bad(message: str) -> ApiFault:
    return ApiFault(400, "INVALID_ARGUMENT", message, "invalid")


def limit_of(scheduling: dict[str, Any]) -> float | None:
    limit = scheduling.get("maxRunDuration")
    return None if limit is None else float(limit.get("seconds", 0))


def is_flex_start(body: Json) -> bool:
    return bool(body.get("scheduling", {}).get("provisioningModel") == "FLEX_START")


def is_low_priority(body: Json) -> bool:
    scheduling = body.get("scheduling", {})
    return bool(scheduling.get("provisioningModel") in ("SPOT", "FLEX_START") or scheduling.get("preemptible"))
