"""Managed instance groups, instance templates and resource policies of Compute Engine."""

from __future__ import annotations

from typing import Any

from fake.compute_instances import Instances, bad, is_flex_start
from fake.compute_machines import MachineKind
from fake.compute_store import Json, Store
from fake.world import ApiFault, Rental, World


class Groups:
    """The groups. All machines of a group are one rental: a slice of several hosts comes and goes as a unit."""

    def __init__(self, world: World, store: Store, instances: Instances) -> None:
        self.world, self.store, self.instances = world, store, instances
        self.rentals: dict[str, Rental] = {}
        self._errors: dict[str, tuple[str, str, int]] = {}
        self._tries: dict[str, Any] = {}
        instances.preempt_listeners.append(self._preempted)
        world.when_capacity_changes.append(self._serve)

    def insert(self, scope: str, body: Json, request_id: str | None) -> Json:
        """Create a group in a scope, such as `projects/p/zones/z`."""
        repeated = self.store.repeated("insert", request_id)
        if repeated is not None:
            return repeated
        name, size = body.get("name", ""), int(body.get("targetSize", 0))
        path = f"{scope}/instanceGroupManagers/{name}"
        template = self.template(body)
        zone = scope.split("/")[3] if "/zones/" in scope else self._zone_of(body)
        if size:
            self.instances.check(zone, name, template["properties"], self.topology(body), size)
        base = body.get("baseInstanceName") or name
        item = self.store.add(path, "instanceGroupManager", body | {"baseInstanceName": base, "targetSize": size})
        group = self.store.add(f"{scope}/instanceGroups/{name}", "instanceGroup", {"name": name, "size": 0})
        item["instanceGroup"] = group["selfLink"]
        item["status"] = {"isStable": size == 0, "stateful": {"hasStatefulConfig": False}}
        item["currentActions"] = actions(creating=size)
        where = self.store.begin(path, "insert", request_id)
        self.world.after(0, lambda: self.store.finish(where))
        if size:
            self.world.after(self.world.delays.create, lambda: self.fill(path, item, zone))
        return dict(self.store.items[where])

    def template(self, body: Json) -> Json:
        link = body.get("instanceTemplate") or next((one["instanceTemplate"] for one in body.get("versions", [])), "")
        return self.store.get(self.store.path_of(link))

    def topology(self, body: Json) -> str | None:
        """Return the topology of the workload policy, which a slice of several hosts needs."""
        link = body.get("resourcePolicies", {}).get("workloadPolicy")
        if link is None:
            return None
        policy = self.store.get(self.store.path_of(link)).get("workloadPolicy", {})
        if policy.get("type") != "HIGH_THROUGHPUT":
            raise bad("A group of TPU machines needs a workload policy of type HIGH_THROUGHPUT.")
        return policy.get("acceleratorTopology")

    def _zone_of(self, body: Json) -> str:
        zones = body.get("distributionPolicy", {}).get("zones", [])
        if not zones:
            raise bad("distributionPolicy.zones is required here.")
        return str(zones[0]["zone"]).rsplit("/", 1)[-1]

    def fill(self, path: str, item: Json, zone: str) -> None:
        """Create the instances of a group, or wait for capacity and try again."""
        if self.store.items.get(path) is not item or path in self.rentals:
            return
        project, size, properties = path.split("/")[1], item["targetSize"], self.template(item)["properties"]
        kind: MachineKind = self.instances.check(zone, item["name"], properties, self.topology(item), size)
        error = self.instances.refused(project, zone, kind, properties)
        if error is not None:
            self._errors[path] = error
            self._tries[path] = (item, zone)
            return
        self._errors.pop(path, None)
        rental = self.instances.rental(item["name"], zone, kind, properties)
        self.rentals[path] = rental
        created = {"items": [*properties.get("metadata", {}).get("items", [])]}
        created["items"].append({"key": "created-by", "value": path})
        members = []
        for index in range(size):
            name = instance_name(item["baseInstanceName"], index)
            where = f"projects/{project}/zones/{zone}/instances/{name}"
            members.append((where, self.instances.add(where, properties | {"metadata": created})))

        def ready(at: float) -> None:
            if self.store.items.get(path) is not item or self.rentals.get(path) is not rental:
                return
            for index, (where, one) in enumerate(members):
                self.instances.run(where, one, rental, index)
                self.store.finish(self.store.begin(where, "insert"))  # the group inserts its machines by operations
                self.instances.start_limit(one, at, lambda: self._limit(path, item, rental))
            item["currentActions"] = actions(none=size)
            item["status"]["isStable"] = True
            self.store.items[path.replace("/instanceGroupManagers/", "/instanceGroups/")]["size"] = size

        def broken(why: str) -> None:
            self._errors[path] = ("INTERNAL_ERROR", why, 500)

        self.world.rent(rental, ready, broken)

    def members(self, path: str) -> list[str]:
        """Return the paths of the instances of a group."""
        return [
            where
            for where, one in sorted(self.store.items.items())
            if "/instances/" in where
            and {"key": "created-by", "value": path} in one.get("metadata", {}).get("items", [])
        ]

    def managed(self, path: str) -> Json:
        """Return what `listManagedInstances` answers: also instances that could not be created yet."""
        item = self.store.get(path)
        found: list[Json] = []
        for where in self.members(path):
            one = self.store.items[where]
            running = one["status"] == "RUNNING"
            action = "NONE" if running or one["status"] == "TERMINATED" else "CREATING"
            if item["currentActions"]["deleting"]:
                action = "DELETING"
            found.append({"instance": one["selfLink"], "id": one["id"], "name": one["name"]})
            found[-1] |= {"instanceStatus": one["status"], "currentAction": action}
        if not found and item["targetSize"] and path not in self.rentals:
            code, message, _ = self._errors.get(path, ("", "", 0))
            attempt = {"errors": {"errors": [{"code": code, "message": message}]}} if code else {}
            for index in range(item["targetSize"]):
                link = path.rsplit("/instanceGroupManagers/", 1)[0]
                name = instance_name(item["baseInstanceName"], index)
                found.append({"instance": self.store.link(f"{link}/instances/{name}"), "currentAction": "CREATING"})
                found[-1] |= {"name": name} | ({"lastAttempt": attempt} if attempt else {})
        return {"managedInstances": found} if found else {}

    def delete(self, path: str, request_id: str | None) -> Json:
        repeated = self.store.repeated("delete", request_id)
        if repeated is not None:
            return repeated
        item = self.store.get(path)
        where = self.store.begin(path, "delete", request_id)
        members = self.members(path)
        for one in members:
            self.store.items[one]["status"] = "STOPPING"
        item["currentActions"] = actions(deleting=len(members))
        item["status"]["isStable"] = False

        def gone() -> None:
            if self.store.items.get(path) is item:
                self._empty(path)
                self._tries.pop(path, None)
                self.store.items.pop(path)
                self.store.items.pop(path.replace("/instanceGroupManagers/", "/instanceGroups/"), None)
            self.store.finish(where)

        self.world.after(self.world.delays.delete, gone)
        return dict(self.store.items[where])

    def _empty(self, path: str, *, preempted: bool = False) -> None:
        for one in self.members(path):
            self.instances.forget(one)
        rental = self.rentals.pop(path, None)
        if rental is not None:
            self.world.end(rental, preempted=preempted)

    def resize(self, path: str, size: int) -> Json:
        item = self.store.get(path)
        if size == 0:
            self._empty(path)
            item.update(targetSize=0, currentActions=actions())
        elif size != item["targetSize"]:
            item["targetSize"] = size
            zone = path.split("/")[3] if "/zones/" in path else self._zone_of(item)
            item["currentActions"] = actions(creating=size)
            self.world.after(self.world.delays.create, lambda: self.fill(path, item, zone))
        return self.store.done_now(path, "resize")

    def resize_request(self, path: str, body: Json, request_id: str | None) -> Json:
        """Create a resize request: the group gets its machines when there is capacity for all of them."""
        repeated = self.store.repeated("createResizeRequest", request_id)
        if repeated is not None:
            return repeated
        item = self.store.get(path)
        if not is_flex_start(self.template(item)["properties"]) and "requestedRunDuration" not in body:
            raise bad("requestedRunDuration is required")
        one = self.store.add(f"{path}/resizeRequests/{body['name']}", "instanceGroupManagerResizeRequest", dict(body))
        one["state"] = "ACCEPTED"
        zone = path.split("/")[3] if "/zones/" in path else self._zone_of(item)
        item["targetSize"] += int(body["resizeBy"])
        item["currentActions"] = actions(creating=item["targetSize"])
        self.world.after(self.world.delays.create, lambda: self.fill(path, item, zone))
        return self.store.done_now(path, "createResizeRequest", request_id)

    def _serve(self) -> None:
        tries, self._tries = self._tries, {}
        for path, (item, zone) in tries.items():
            self.fill(path, item, zone)

    def _limit(self, path: str, item: Json, rental: Rental) -> None:
        if self.store.items.get(path) is item and self.rentals.get(path) is rental:
            for one in self.members(path):
                self.instances.record_end(one)
            self._after_end(path, item, preempted=False)

    def _preempted(self, rental: Rental) -> bool:
        for path, mine in list(self.rentals.items()):
            if mine is rental:
                for one in self.members(path):
                    self.instances.record_preemption(one)
                self._after_end(path, self.store.items[path], preempted=True)
                return True
        return False

    def _after_end(self, path: str, item: Json, *, preempted: bool) -> None:
        """End the machines of a group. A group repairs itself, unless its policy is DO_NOTHING."""
        members = self.members(path)
        action = self.store.items[members[0]]["scheduling"].get("instanceTerminationAction") if members else "DELETE"
        self.world.end(self.rentals[path], preempted=preempted, kill=preempted)
        repair = item.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure", "REPAIR") == "REPAIR"
        if action == "DELETE" or repair:
            self._empty(path, preempted=preempted)
        else:
            for one in members:
                self.store.items[one]["status"] = "TERMINATED"
        item["status"]["isStable"] = not repair
        if repair:
            zone = path.split("/")[3] if "/zones/" in path else self._zone_of(item)
            item["currentActions"] = actions(recreating=item["targetSize"])
            self.world.after(self.world.delays.create, lambda: self.fill(path, item, zone))
        else:
            item["currentActions"] = actions()

    def quota_used(self) -> list[tuple[str, str, bool, int]]:
        return [
            (one.zone, one.slice.split("-")[0], one.spot, one.chips)
            for one in self.rentals.values()
            if not one.ended_at
        ]


def check_unused(store: Store, path: str, key: str) -> None:
    """Raise if a group uses the template or policy: the API refuses to delete it."""
    for where, one in store.items.items():
        if "/instanceGroupManagers/" not in where or "/resizeRequests/" in where:
            continue
        links = [one.get("instanceTemplate"), one.get("resourcePolicies", {}).get("workloadPolicy")]
        links += [version.get("instanceTemplate") for version in one.get("versions", [])]
        if any(link is not None and store.path_of(link) == path for link in links):
            message = f"The {key} resource '{path}' is already being used by '{where}'"
            raise ApiFault(400, "FAILED_PRECONDITION", message, "resourceInUseByAnotherResource")


def instance_name(base: str, index: int) -> str:
    """Return the name of a machine: `vm-###` becomes `vm-001` for the first one; otherwise a suffix is added."""
    plain = base.rstrip("#")
    return f"{base}-{index:04}" if plain == base else f"{plain}{index + 1:0{len(base) - len(plain)}}"


def actions(**counts: int) -> Json:
    names = ("abandoning", "creating", "creatingWithoutRetries", "deleting", "none", "recreating", "refreshing")
    names += ("restarting", "resuming", "starting", "stopping", "suspending", "verifying")
    return dict.fromkeys(names, 0) | counts
