"""Collections, links and operations of the Compute Engine API."""

from __future__ import annotations

import itertools
import re
from typing import Any

from fake.clock import compute_timestamp
from fake.world import ApiFault, World

Json = dict[str, Any]
ROOT = "/compute/v1/"


class Store:
    """The resources of the API by their path, such as `projects/p/zones/z/instances/one`, and the operations."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.base = f"https://www.googleapis.com{ROOT}"
        self.items: dict[str, Json] = {}
        self.by_request: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count(1)

    def link(self, path: str) -> str:
        return f"{self.base}{path}"

    def path_of(self, link: str) -> str:
        """Return the path of a link, which may be complete or begin with `projects/`, `zones/` or `global/`."""
        path = re.split(r"/compute/(?:v1|beta|alpha)/", link)[-1]
        if path.startswith(("zones/", "regions/", "global/")):
            path = next((one for one in self.items if one.split("/", 2)[2] == path), path)
        return path

    def next_id(self) -> str:
        return str(7_000_000_000_000_000_000 + next(self._numbers))

    def get(self, path: str) -> Json:
        if path not in self.items:
            raise ApiFault(404, "NOT_FOUND", f"The resource '{path}' was not found", "notFound")
        return self.items[path]

    def add(self, path: str, kind: str, body: Json) -> Json:
        """Add a resource with the fields that the API fills in. Raise if it exists."""
        if path in self.items:
            raise ApiFault(409, "ALREADY_EXISTS", f"The resource '{path}' already exists", "alreadyExists")
        scope = path.split("/")
        item = body | {
            "kind": f"compute#{kind}",
            "id": self.next_id(),
            "creationTimestamp": compute_timestamp(self.world.now()),
            "selfLink": self.link(path),
        }
        if scope[2] in ("zones", "regions"):
            item[scope[2].removesuffix("s")] = self.link("/".join(scope[:4]))
        self.items[path] = item
        return item

    def inside(self, parent: str) -> list[Json]:
        """Return the resources directly in a collection, such as `projects/p/zones/z/instances`."""
        return [one for path, one in sorted(self.items.items()) if path.rsplit("/", 1)[0] == parent]

    # Operations

    def begin(self, path: str, verb: str, request_id: str | None = None) -> str:
        scope = path.split("/")
        place = scope[:4] if scope[2] in ("zones", "regions") else scope[:3]
        name = f"operation-{1_700_000_000_000 + next(self._numbers)}-{abs(hash(path)) % 10**8:08x}"
        where = "/".join([*place, "operations", name])
        target = self.items.get(path, {})
        operation = {
            "kind": "compute#operation",
            "id": self.next_id(),
            "name": name,
            "operationType": verb,
            "targetLink": self.link(path),
            "targetId": target.get("id", "0"),
            "status": "RUNNING",
            "user": "tester@example.com",
            "progress": 0,
            "insertTime": compute_timestamp(self.world.now()),
            "startTime": compute_timestamp(self.world.now()),
            "selfLink": self.link(where),
        }
        if place[2] in ("zones", "regions"):
            operation[place[2].removesuffix("s")] = self.link("/".join(place))
        self.items[where] = operation
        if request_id:
            self.by_request[verb, request_id] = where
        return where

    def repeated(self, verb: str, request_id: str | None) -> Json | None:
        found = self.by_request.get((verb, request_id or ""))
        return None if found is None else self.items[found]

    def finish(self, where: str, error: tuple[str, str, int] | None = None) -> None:
        """End an operation, with (code, message, HTTP status) if it failed."""
        operation = self.items[where]
        if operation["status"] == "DONE":
            return
        operation.update(status="DONE", progress=100, endTime=compute_timestamp(self.world.now()))
        if error is not None:
            code, message, http = error
            operation["error"] = {"errors": [{"code": code, "message": message}]}
            operation["httpErrorStatusCode"] = http
            operation["httpErrorMessage"] = {403: "FORBIDDEN", 503: "SERVICE UNAVAILABLE"}.get(http, "BAD REQUEST")

    def done_now(self, path: str, verb: str, request_id: str | None = None) -> Json:
        """Return an operation that is complete at the next request."""
        where = self.begin(path, verb, request_id)
        self.world.after(0, lambda: self.finish(where))
        return dict(self.items[where])


def matches(item: Json, text: str) -> bool:
    """Return whether a resource matches a filter. Only comparisons of labels, names and states are supported."""
    for part in re.split(r"\s+AND\s+|\)\s*\(", text.strip()):
        plain = part.strip().strip("()").strip()
        found = re.fullmatch(r"([\w.\-]+)\s*(=|!=|:|eq|ne)\s*(.*)", plain)
        if found is None:
            raise ApiFault(400, "INVALID_ARGUMENT", f"Invalid value for field 'filter': '{text}'.", "invalid")
        key, operator, wanted = found[1], found[2], found[3].strip().strip("\"'")
        value: Any = item
        for name in key.split(".", 1) if key.startswith("labels.") else key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if operator in ("=", "eq", ":"):
            if wanted == "*":
                good = value is not None
            elif operator == "eq":
                good = value is not None and re.fullmatch(wanted, str(value)) is not None
            else:
                good = value is not None and str(value) == wanted
        else:
            good = str(value) != wanted
        if not good:
            return False
    return True
