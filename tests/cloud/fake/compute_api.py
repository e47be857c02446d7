"""The URLs of the Compute Engine API."""

from __future__ import annotations

import re
from typing import Any

from fake import fields, tables
from fake.compute_groups import Groups, check_unused
from fake.compute_instances import Instances, bad
from fake.compute_machines import GPUS, ONLY_TPUS, TPU_MACHINES, machine_kind, region_of, zone_names
from fake.compute_store import Json, Store, matches
from fake.world import World

PATH = re.compile(
    r"/compute/(?:v1|beta|alpha)/projects/([^/]+)"
    r"(?:/(global|aggregated|zones/[^/]+|regions/[^/]+))?(?:/(\w+)(?:/([^/]+)(?:/([^/]+)(?:/([^/]+))?)?)?)?"
)
MESSAGES = {
    "instances": "Instance",
    "instanceTemplates": "InstanceTemplate",
    "instanceGroupManagers": "InstanceGroupManager",
    "resourcePolicies": "ResourcePolicy",
    "disks": "Disk",
    "firewalls": "Firewall",
}
KINDS = {
    "instances": "instance",
    "instanceGroupManagers": "instance group",
    "instanceTemplates": "template",
    "resourcePolicies": "policy",
    "disks": "disk",
    "firewalls": "firewall",
}


class ComputeApi:
    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store(world)
        self.instances = Instances(world, self.store)
        self.groups = Groups(world, self.store, self.instances)
        world.quota_users += [self.instances.quota_used, self.groups.quota_used]

    def answer(self, method: str, path: str, query: dict[str, str], body: Json) -> Json | None:
        """Return the answer, or None if the URL is not one of this API."""
        match = PATH.fullmatch(path)
        if match is None:
            return None
        project, scope, kind, item, verb, rest = match.groups()
        if scope is None:
            if kind in ("zones", "regions") and method == "GET":
                return self._places(project, kind, item, query)
            return self._project(project) if kind is None else None
        if kind is None and method == "GET":  # zones/Z and regions/R
            return self._places(project, scope.split("/")[0], scope.split("/")[1], query)
        if scope == "aggregated":
            return self._aggregated(project, kind, query)
        root = f"projects/{project}/{scope}"
        parent = f"{root}/{kind}"
        where = f"{parent}/{item}"
        request_id = query.get("requestId")
        if method == "POST" and item is None and kind in MESSAGES:
            fields.check("compute/v1", MESSAGES[kind], body)
        if kind == "autoscalers":
            return self._page([], query)
        if kind == "operations":
            return self._operation(method, parent, item, query)
        if kind in ("machineTypes", "acceleratorTypes", "networks", "subnetworks", "images"):
            return self._catalog(project, scope, kind, verb if item == "family" else item, query)
        if kind == "instances":
            return self._instances(method, project, scope, parent, where, item, verb, query, body)
        if kind == "instanceGroupManagers":
            return self._groups(method, root, parent, where, item, verb, rest, query, body)
        if kind in ("instanceTemplates", "resourcePolicies", "firewalls", "disks", "instanceGroups", "reservations"):
            if method == "POST" and item is None:
                repeated = self.store.repeated("insert", request_id)
                if repeated is not None:
                    return repeated
                made = f"{parent}/{body.get('name', '')}"
                self.store.add(made, kind.removesuffix("s"), self._defaults(kind, body))
                return self.store.done_now(made, "insert", request_id)
            if method == "GET":
                return self.store.get(where) if item else self._list(parent, query)
            if method == "DELETE" and item:
                repeated = self.store.repeated("delete", request_id)
                if repeated is not None:
                    return repeated
                found = self.store.get(where)
                check_unused(self.store, where, kind)
                if kind == "disks" and found.get("users"):
                    raise bad(f"The disk resource '{where}' is already being used by '{found['users'][0]}'")
                operation = self.store.done_now(where, "delete", request_id)
                self.store.items.pop(where)
                return operation
        return None

    def _defaults(self, kind: str, body: Json) -> Json:
        return body | {"status": "READY"} if kind in ("disks", "resourcePolicies") else dict(body)

    def _instances(self, method: str, project: str, scope: str, parent: str, where: str, *rest: Any) -> Json | None:
        item, verb, query, body = rest
        if method == "POST" and item is None:
            return self.instances.insert(project, scope.split("/")[1], body, query.get("requestId"))
        if method == "GET" and verb == "getGuestAttributes":
            return self.instances.guest_attributes(where, query.get("queryPath", ""))
        if method == "GET" and verb is None:
            return self.store.get(where) if item else self._list(parent, query)
        if method == "DELETE" and verb is None:
            return self.instances.delete(where, query.get("requestId"))
        if method == "POST" and verb == "stop":
            return self.instances.stop(where)
        if method == "POST" and verb == "setLabels":
            self.store.get(where)["labels"] = body.get("labels", {})
            return self.store.done_now(where, "setLabels")
        if method == "POST" and verb == "setMetadata":
            self.store.get(where)["metadata"] |= {"items": body.get("items", [])}
            return self.store.done_now(where, "setMetadata")
        return None

    def _groups(self, method: str, root: str, parent: str, where: str, *more: Any) -> Json | None:
        item, verb, rest, query, body = more
        request_id = query.get("requestId")
        if method == "POST" and item is None:
            return self.groups.insert(root, body, request_id)
        if verb == "resizeRequests":
            if method == "POST":
                return self.groups.resize_request(where, body, request_id)
            if method == "GET":
                return (
                    self.store.get(f"{where}/resizeRequests/{rest}") if rest else self._list(f"{where}/{verb}", query)
                )
        if method == "GET" and verb is None:
            return self.store.get(where) if item else self._list(parent, query)
        if method == "DELETE" and verb is None:
            return self.groups.delete(where, request_id)
        if verb == "listManagedInstances":
            return self.groups.managed(where)
        if method == "POST" and verb == "resize":
            return self.groups.resize(where, int(query["size"]))
        if method == "GET" and verb == "listErrors":
            return {}
        return None

    def _operation(self, method: str, parent: str, item: str | None, query: dict[str, str]) -> Json | None:
        if item is None:
            return self._list(parent, query)
        # `wait` answers at once: the fake's clock may stand still. Clients repeat it.
        return self.store.get(f"{parent}/{item}") if method in ("GET", "POST") else None

    def _list(self, parent: str, query: dict[str, str]) -> Json:
        found = self.store.inside(parent)
        return self._page([one for one in found if "filter" not in query or matches(one, query["filter"])], query)

    def _page(self, items: list[Json], query: dict[str, str]) -> Json:
        size, start = int(query.get("maxResults", 0)) or 500, int(query.get("pageToken") or 0)
        more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
        return {"kind": "compute#list", "items": items[start : start + size]} | more

    def _aggregated(self, project: str, kind: str, query: dict[str, str]) -> Json:
        found: dict[str, Json] = {}
        scopes = ["global", *(f"zones/{zone}" for zone in zone_names())]
        scopes += [f"regions/{region}" for region in sorted({region_of(zone) for zone in zone_names()})]
        for scope in scopes:
            key = "subnetworks" if kind == "subnetworks" else kind
            items = self.store.inside(f"projects/{project}/{scope}/{kind}")
            items = [one for one in items if "filter" not in query or matches(one, query["filter"])]
            if kind in ("machineTypes", "subnetworks") and scope != "global":
                items = (self._catalog(project, scope, kind, None, query) or {}).get("items", [])
            warning = {
                "code": "NO_RESULTS_ON_PAGE",
                "message": f"There are no results for scope '{scope}' on this page.",
            }
            found[scope] = {key: items} if items else {"warning": warning}
        return {"kind": "compute#aggregatedList", "items": found}

    # What a project has

    def _project(self, project: str) -> Json:
        account = "123456-compute@developer.gserviceaccount.com"
        metadata = {"kind": "compute#metadata", "items": self.world.settings.get("project_metadata", [])}
        return {
            "kind": "compute#project",
            "name": project,
            "defaultServiceAccount": account,
            "commonInstanceMetadata": metadata,
            "selfLink": self.store.link(f"projects/{project}"),
            "quotas": [],
        }

    def _places(self, project: str, kind: str, item: str | None, query: dict[str, str]) -> Json:
        zones = zone_names()
        names = zones if kind == "zones" else sorted({region_of(zone) for zone in zones})
        found = []
        for name in names:
            one: Json = {"kind": f"compute#{kind[:-1]}", "name": name, "status": "UP"}
            one["selfLink"] = self.store.link(f"projects/{project}/{kind}/{name}")
            if kind == "zones":
                one["region"] = self.store.link(f"projects/{project}/regions/{region_of(name)}")
            else:
                one["quotas"] = self._quotas(name)
                one["zones"] = [self.store.link(f"projects/{project}/zones/{zone}") for zone in zones if name in zone]
            found.append(one)
        if item is None:
            return self._page(found, query)
        for one in found:
            if one["name"] == item:
                return one
        return self.store.get(f"projects/{project}/{kind}/{item}")

    def _quotas(self, region: str) -> list[Json]:
        """Return the quotas of a region: those that tests set, and a few large ones."""
        large = {"CPUS": 5000.0, "DISKS_TOTAL_GB": 500000.0, "IN_USE_ADDRESSES": 500.0, "NVIDIA_H100_GPUS": 64.0}
        large |= {"SSD_TOTAL_GB": 100000.0, "NVIDIA_L4_GPUS": 64.0, "NVIDIA_A100_GPUS": 64.0, "INSTANCES": 5000.0}
        large |= self.world.settings.get("region_quotas", {}).get(region, {})
        return [{"metric": name, "limit": limit, "usage": 0.0} for name, limit in sorted(large.items())]

    def _catalog(self, project: str, scope: str, kind: str, item: str | None, query: dict[str, str]) -> Json | None:
        place, root = scope.split("/")[-1], f"projects/{project}/{scope}/{kind}"
        names: list[str] = []
        if kind == "machineTypes":
            names = [
                f"{family}-{count}t"
                for family, generation in TPU_MACHINES.items()
                for count in (1, 4, 8)
                if place in tables.zones(generation)
                and machine_kind(f"{family}-{count}t", place, None, 1, spot=False, prices={}) is not None
            ]
            small = ["e2-small", "e2-medium", "e2-standard-2"] if place not in ONLY_TPUS else []
            names += [*small, "n2-standard-2", "n1-standard-1", *GPUS]
        elif kind == "networks" or (kind == "subnetworks" and scope.startswith("regions/")):
            names = ["default"]
        elif kind == "images":
            names = [str(item)]
        details = self.world.settings.get("subnetwork", {}) if kind == "subnetworks" else {}
        found = [
            {"kind": f"compute#{kind[:-1]}", "name": one, "selfLink": self.store.link(f"{root}/{one}")}
            | (
                {"network": self.store.link(f"projects/{project}/global/networks/default")}
                if details or kind == "subnetworks"
                else {}
            )
            | ({"privateIpGoogleAccess": False} | details if kind == "subnetworks" else {})
            for one in names
        ]
        if item is None:
            return self._page(found, query)
        for one in found:
            if one["name"] == item:
                return one
        return self.store.get(f"{root}/{item}")

    def resources(self) -> list[Json]:
        """Return everything that tests count as left over."""
        found = []
        for path, one in self.store.items.items():
            kind, name = path.split("/")[-2:]
            if kind in KINDS and not one.get("_given"):
                scope = path.split("/")
                place = scope[3] if scope[2] in ("zones", "regions") else "global"
                found.append({"kind": KINDS[kind], "name": name, "zone": place, "resource": one})
        return found
