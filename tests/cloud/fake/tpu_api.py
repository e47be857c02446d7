"""The URLs of the Cloud TPU API, versions v2 and v2alpha1."""

from __future__ import annotations

import re
from typing import Any

from fake import fields, tables
from fake.tpu_nodes import Json, TpuNodes, TpuOperations
from fake.tpu_queue import TpuQueue
from fake.world import World, invalid, not_found

PATH = re.compile(r"/(v2|v2alpha1)/(projects/[^/]+/locations(?:/[^/]+)?)(?:/(\w+)(?:/([^/:]+))?(?::(\w+))?)?")


class TpuApi:
    def __init__(self, world: World) -> None:
        self.world = world
        self.operations = TpuOperations(world)
        self.nodes = TpuNodes(world, self.operations)
        self.queue = TpuQueue(world, self.operations, self.nodes)

    def answer(self, method: str, path: str, query: dict[str, str], body: Json) -> Json | None:
        """Return the answer, or None if the URL is not one of this API."""
        match = PATH.fullmatch(path)
        if match is None:
            return None
        version, parent, kind, item, verb = match.groups()
        name = f"{parent}/{kind}/{item}"
        if kind is None:
            return self._locations(parent)
        if verb:
            return self._custom(method, version, name, kind, verb, body)
        if kind == "nodes":
            return self._nodes(method, version, parent, item, query, body)
        if kind == "queuedResources":
            return self._queue(method, version, parent, item, query, body)
        if kind == "operations" and method == "GET":
            if item:
                return self.operations.get(name)
            return {"operations": [one for key, one in self.operations.operations.items() if key.startswith(parent)]}
        if kind in ("acceleratorTypes", "runtimeVersions") and method == "GET":
            return self._catalog(parent, kind, item)
        return None

    def _nodes(self, method: str, version: str, parent: str, item: str | None, query: Json, body: Json) -> Json | None:
        request_id = query.get("requestId")
        if request_id is not None and version == "v2":
            raise invalid('Invalid JSON payload received. Unknown name "requestId": Cannot bind query parameter.')
        if method == "POST" and not item:
            fields.check(f"tpu/{version}", "Node", body)
            return self.nodes.create(parent, query.get("nodeId", ""), body, version, request_id)
        if method == "GET":
            return self.nodes.get(f"{parent}/nodes/{item}") if item else page("nodes", self.nodes.list(parent), query)
        if method == "DELETE" and item:
            return self.nodes.delete(f"{parent}/nodes/{item}", version, request_id)
        return None

    def _queue(self, method: str, version: str, parent: str, item: str | None, query: Json, body: Json) -> Json | None:
        name, request_id = f"{parent}/queuedResources/{item}", query.get("requestId")
        if method == "POST" and not item:
            fields.check(f"tpu/{version}", "QueuedResource", body)
            return self.queue.create(parent, query.get("queuedResourceId", ""), body, version, request_id)
        if method == "GET":
            return self.queue.get(name) if item else page("queuedResources", self.queue.list(parent), query)
        if method == "DELETE" and item:
            force = query.get("force", "").lower() == "true"
            return self.queue.delete(name, version, force=force, request_id=request_id)
        return None

    def _custom(self, method: str, version: str, name: str, kind: str, verb: str, body: Json) -> Json | None:
        if method != "POST":
            return None
        if (kind, verb) == ("nodes", "getGuestAttributes"):
            return self._guest_attributes(name, body)
        if (kind, verb) == ("queuedResources", "reset"):
            return self.queue.reset(name, version)
        return None

    def _guest_attributes(self, name: str, body: Json) -> Json:
        self.nodes.get(name)
        fields.check("tpu/v2", "GetGuestAttributesRequest", body)
        path, workers = body.get("queryPath", ""), [one for one in body.get("workerIds", []) if one]
        found = []
        for index, keys in enumerate(self.world.machines.host_keys(name.rsplit("/", 1)[1])):
            if workers and str(index) not in workers:
                continue
            items = [
                {"namespace": "hostkeys", "key": kind, "value": value}
                for kind, value in (key.split()[:2] for key in keys)
            ]
            wanted = [one for one in items if f"{one['namespace']}/{one['key']}".startswith(path.rstrip("/"))]
            found.append({"queryPath": path, "queryValue": {"items": wanted}})
        return {"guestAttributes": found}

    def _locations(self, parent: str) -> Json:
        project, _, zone = parent.removeprefix("projects/").partition("/locations")
        places = [
            {"name": f"projects/{project}/locations/{one}", "locationId": one}
            for one in tables.all_zones()
            if zone in ("", f"/{one}")
        ]
        if not zone:
            return {"locations": places}
        if not places:
            raise not_found(parent)
        return places[0]

    def _catalog(self, parent: str, kind: str, item: str | None) -> Json:
        zone = parent.split("/")[3]
        found: list[dict[str, Any]] = []
        if kind == "acceleratorTypes":
            for shape in {one.api_name: one for one in tables.shapes().values()}.values():
                if shape.generation != "tpu7x" and (zone == "-" or zone in tables.zones(shape.generation)):
                    config = {"type": shape.generation.upper().replace("V5E", "V5LITE_POD"), "topology": shape.topology}
                    name = f"{parent}/acceleratorTypes/{shape.api_name}"
                    found.append({"name": name, "type": shape.api_name, "acceleratorConfigs": [config]})
        else:
            versions = sorted({*tables.RUNTIMES.values(), *self.world.settings.get("runtimes", ())})
            found = [{"name": f"{parent}/runtimeVersions/{one}", "version": one} for one in versions]
        if item is None:
            return {kind: found}
        for one in found:
            if one["name"].endswith(f"/{item}"):
                return one
        raise not_found(f"{parent}/{kind}/{item}")


def page(key: str, items: list[Json], query: dict[str, str]) -> Json:
    """Return a part of a list, as `pageSize` and `pageToken` ask for."""
    size, start = int(query.get("pageSize", 0)) or 1000, int(query.get("pageToken") or 0)
    more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
    return ({key: items[start : start + size]} if items else {}) | more
