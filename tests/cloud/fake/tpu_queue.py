"""Queued resources of the Cloud TPU API: requests that wait for capacity."""

from __future__ import annotations

from typing import Any

from fake import tables
from fake.clock import seconds_at, timestamp
from fake.tpu_nodes import NAME, Json, TpuNodes, TpuOperations, shape_of
from fake.world import ApiFault, Rental, World, invalid, not_found

MOST_FLEX_START_SECONDS = 7 * 86400
# A request in one of these states can be deleted without force.
DELETABLE = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED")


class TpuQueue:
    """The queued resources, which create nodes when there is capacity."""

    def __init__(self, world: World, operations: TpuOperations, nodes: TpuNodes) -> None:
        self.world, self.operations, self.nodes = world, operations, nodes
        self.requests: dict[str, Json] = {}
        self._not_before: dict[str, float] = {}
        world.quota_users.append(self.quota_used)
        nodes.listeners.append(self._node_changed)
        world.when_capacity_changes.append(self.serve)
        world.when_preempted.append(self._preempted)

    def create(self, parent: str, request: str, body: Json, version: str, request_id: str | None) -> Json:
        repeated = self.operations.repeated("queuedResources.create", parent, request_id)
        if repeated is not None:
            return repeated
        name = f"{parent}/queuedResources/{request}"
        if not NAME.fullmatch(request):
            raise invalid(f"Invalid resource name '{request}': it must match {NAME.pattern}")
        if name in self.requests:
            raise ApiFault(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
        self._check(body, version)
        for spec in body["tpu"]["nodeSpec"]:
            self.nodes.check(parent, spec["nodeId"], spec["node"])
            self.nodes.check_quota(parent, spec["node"], spot=is_low_priority(body))
        operation = self.operations.begin(parent, "create", name, version)
        self.operations.remember("queuedResources.create", parent, request_id, operation)
        kept = body | {"name": name, "createTime": timestamp(self.world.now()), "state": state_of("CREATING", "USER")}
        self.requests[name] = kept
        self._not_before[name] = self.world.now() + self.world.delays.queue

        def accepted() -> None:
            if self.requests.get(name) is kept and kept["state"]["state"] == "CREATING":
                kept["state"] = state_of("WAITING_FOR_RESOURCES", "SERVICE")
                self.operations.finish(operation, {"@type": type_of(version)} | kept)
                self.world.after(max(0.0, self._not_before[name] - self.world.now()), self.serve)
            else:
                self.operations.finish(operation, error=("CANCELLED", f"{name} was deleted"))

        self.world.after(0, accepted)
        limit = self._valid_until(body)
        if limit is not None:
            self.world.after(max(0.0, limit - self.world.now()), lambda: self._expire(name, kept))
        return dict(self.operations.get(operation))

    def _check(self, body: Json, version: str) -> None:
        specs = body.get("tpu", {}).get("nodeSpec", [])
        if len(specs) != 1 or not specs[0].get("nodeId"):
            raise invalid("tpu.nodeSpec must have one node with a nodeId")
        model, limit = body.get("provisioningModel"), body.get("runDuration", {}).get("maxRunDuration")
        if model == "FLEX_START" and limit is None:
            raise invalid("runDuration is required for the provisioning model FLEX_START")
        if limit is not None and not 0 < float(limit.removesuffix("s")) <= MOST_FLEX_START_SECONDS:
            raise invalid("runDuration.maxRunDuration must be at most 604800s")
        if limit is not None and model != "FLEX_START":
            raise invalid("runDuration is supported for the provisioning model FLEX_START only")
        if "spot" in body and model not in (None, "SPOT", "PROVISIONING_MODEL_UNSPECIFIED"):
            raise invalid(f"spot is set, but provisioningModel is {model}")
        if "spot" in body and "guaranteed" in body:
            raise invalid("oneof field 'tier' is already set. Cannot set 'guaranteed'")

    def _valid_until(self, body: Json) -> float | None:
        policy = body.get("queueingPolicy", {})
        if "validUntilDuration" in policy:
            return self.world.now() + float(policy["validUntilDuration"].removesuffix("s"))
        return seconds_at(policy["validUntilTime"]) if "validUntilTime" in policy else None

    def _expire(self, name: str, request: Json) -> None:
        if self.requests.get(name) is request and request["state"]["state"] == "WAITING_FOR_RESOURCES":
            self._fail(request, 4, "the request was not served before valid_until")

    def _fail(self, request: Json, code: int, message: str) -> None:
        request["state"] = state_of("FAILED", "SERVICE") | {"failedData": {"error": {"code": code, "message": message}}}

    def serve(self) -> None:
        """Give capacity to the requests that wait, the oldest first."""
        for name, request in self.requests.items():
            if request["state"]["state"] != "WAITING_FOR_RESOURCES" or self._not_before[name] > self.world.now():
                continue
            spec = request["tpu"]["nodeSpec"][0]
            zone, wanted = name.split("/")[3], shape_of(spec["node"])
            assert wanted is not None
            if self.world.free_capacity(zone, wanted.name):
                self._provision(name, request, spec)

    def _provision(self, name: str, request: Json, spec: Json) -> None:
        parent = name.rsplit("/queuedResources/", 1)[0]
        request["state"] = state_of("PROVISIONING", "SERVICE")
        node = dict(spec["node"])
        node["schedulingConfig"] = node.get("schedulingConfig", {}) | ({"spot": True} if "spot" in request else {})
        # The operation tells when the node became ready. It is not known whether the real API lists it.
        operation = self.operations.begin(parent, "create", f"{parent}/nodes/{spec['nodeId']}", "v2alpha1")
        self.nodes.add(parent, spec["nodeId"], node, "v2alpha1", operation, name, spot=is_low_priority(request))

    def _node_changed(self, node_name: str) -> None:
        """Follow a node: its request becomes ACTIVE with it, and SUSPENDED after it."""
        for name, request in self.requests.items():
            parent, spec = name.rsplit("/queuedResources/", 1)[0], request["tpu"]["nodeSpec"][0]
            if node_name != f"{parent}/nodes/{spec['nodeId']}":
                continue
            node, state = self.nodes.nodes.get(node_name), request["state"]["state"]
            if node is not None and node["state"] == "READY" and state == "PROVISIONING":
                self._activate(name, request, node_name, node)
            elif node is None and state in ("ACTIVE", "PROVISIONING"):
                request["state"] = state_of("SUSPENDED", "USER")

    def _activate(self, name: str, request: Json, node_name: str, node: Json) -> None:
        request["state"] = state_of("ACTIVE", "SERVICE")
        limit = request.get("runDuration", {}).get("maxRunDuration")
        if limit is not None:
            seconds = float(limit.removesuffix("s"))
            node["schedulingConfig"]["terminationTimestamp"] = timestamp(self.world.now() + seconds)
            self.world.after(seconds, lambda: self._end_of_duration(name, request, node_name, node))

    def _end_of_duration(self, name: str, request: Json, node_name: str, node: Json) -> None:
        if self.nodes.nodes.get(node_name) is node and self.requests.get(name) is request:
            request["state"] = state_of("SUSPENDING", "SERVICE")
            self.nodes.remove(node_name, lambda: request.update(state=state_of("SUSPENDED", "SERVICE")))

    def get(self, name: str) -> Json:
        if name not in self.requests:
            raise not_found(name)
        return self.requests[name]

    def list(self, parent: str) -> list[Json]:
        project, zone = parent.split("/")[1], parent.split("/")[3]
        return [
            one
            for name, one in sorted(self.requests.items())
            if name.split("/")[1] == project and zone in ("-", name.split("/")[3])
        ]

    def delete(self, name: str, version: str, *, force: bool, request_id: str | None) -> Json:
        parent = name.rsplit("/queuedResources/", 1)[0]
        repeated = self.operations.repeated("queuedResources.delete", parent, request_id)
        if repeated is not None:
            return repeated
        request = self.get(name)
        nodes = [f"{parent}/nodes/{spec['nodeId']}" for spec in request["tpu"]["nodeSpec"]]
        mine = [node for node in nodes if self.nodes.nodes.get(node, {}).get("queuedResource") == name]
        if not force and (mine or request["state"]["state"] not in DELETABLE):
            state = request["state"]["state"]
            raise ApiFault(
                400,
                "FAILED_PRECONDITION",
                f"Queued resource {name} is {state} and has nodes; delete them or use force=true",
            )
        operation = self.operations.begin(parent, "delete", name, version)
        self.operations.remember("queuedResources.delete", parent, request_id, operation)
        request["state"] = state_of("DELETING", "USER")
        left = set(mine)

        def gone() -> None:
            if self.requests.get(name) is request:
                del self.requests[name]
            self.operations.finish(operation)

        def node_gone(node: str) -> None:
            left.discard(node)
            if not left:
                gone()

        for node in mine:
            self.nodes.remove(node, lambda node=node: node_gone(node))
        if not mine:
            self.world.after(self.world.delays.delete, gone)
        return dict(self.operations.get(operation))

    def reset(self, name: str, version: str) -> Json:
        request = self.get(name)
        if request["state"]["state"] != "SUSPENDED":
            raise ApiFault(400, "FAILED_PRECONDITION", f"Queued resource {name} is not SUSPENDED")
        operation = self.operations.begin(name.rsplit("/queuedResources/", 1)[0], "reset", name, version)
        request["state"] = state_of("WAITING_FOR_RESOURCES", "USER")
        self.world.after(0, lambda: self.operations.finish(operation, dict(request)))
        self.world.after(0, self.serve)
        return dict(self.operations.get(operation))

    def _preempted(self, rental: Rental) -> None:
        for name, request in self.requests.items():
            zone, spec = name.split("/")[3], request["tpu"]["nodeSpec"][0]
            if (spec["nodeId"], zone) == (rental.name, rental.zone) and request["state"]["state"] == "ACTIVE":
                request["state"] = state_of("SUSPENDING", "SERVICE")
                self.world.after(0, lambda request=request: self._suspend(request))

    def _suspend(self, request: Json) -> None:
        if request["state"]["state"] == "SUSPENDING":
            request["state"] = state_of("SUSPENDED", "SERVICE")

    def quota_used(self) -> list[tuple[str, str, bool, int]]:
        """Return what each request uses, in every state: also FAILED and SUSPENDED ones use quota."""
        used = []
        for name, request in self.requests.items():
            for spec in request["tpu"]["nodeSpec"]:
                wanted: tables.SliceShape | None = shape_of(spec["node"])
                if wanted is not None:
                    used.append((name.split("/")[3], wanted.generation, is_low_priority(request), wanted.chips))
        return used


def is_low_priority(request: Json) -> bool:
    """Return whether a request draws on the preemptible quota and price. Flex-start does."""
    return "spot" in request or "bestEffort" in request or request.get("provisioningModel") in ("SPOT", "FLEX_START")


def state_of(state: str, initiator: str) -> dict[str, Any]:
    data = {"CREATING": "creatingData", "ACTIVE": "activeData", "PROVISIONING": "provisioningData"}
    data |= {"SUSPENDED": "suspendedData", "SUSPENDING": "suspendingData", "DELETING": "deletingData"}
    return {"state": state, "stateInitiator": initiator} | ({data[state]: {}} if state in data else {})


def type_of(version: str) -> str:
    return f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource"
