"""The Cloud TPU API over the simulated cloud, for the real `TpuProvider`: requests and answers without a network."""

from __future__ import annotations

import copy
import datetime as dt
import email.utils
from collections.abc import Mapping
from typing import Any

from forerun.cloud import labels
from forerun.cloud.google.rest import Endpoints, Rest
from forerun.cloud.provider import RequestRefused, SliceRequest, SliceState
from forerun.cloud.tpu.node_request import slice_of
from forerun.cloud.tpu.tpu_provider import TpuProvider
from simulation.machines import Cloud, Machine
from simulation.process import Process

BASE, PROJECT = "https://tpu.simulated/", "sim"
ODD: tuple[Any, ...] = (None, 7, "x", [], {}, ["x"], True, [[]])
QUEUE_STATES = {SliceState.WAITING: "WAITING_FOR_RESOURCES", SliceState.READY: "ACTIVE"}
Json = dict[str, Any]


class Reply:
    """An HTTP answer."""

    def __init__(self, status: int, content: Any, time: float) -> None:
        self.status_code, self._content = status, content
        self.headers = {"Date": email.utils.formatdate(time, usegmt=True)}

    def json(self) -> Any:
        if isinstance(self._content, ValueError):
            raise self._content
        return self._content


def tpu_provider(cloud: Cloud, process: Process) -> TpuProvider:
    """Return the provider of a process. Its pauses between repeated requests take no time."""
    client = Rest(
        PROJECT,
        TpuSession(cloud, process),
        Endpoints({"tpu": BASE, "compute": BASE}),
        sleep=lambda seconds: None,
        elapsed=lambda: process.world.now,
        jitter=lambda: 0.0,
    )
    return TpuProvider(client)


class TpuSession:
    """Answers the requests of one process."""

    def __init__(self, cloud: Cloud, process: Process) -> None:
        self.cloud, self.process = cloud, process

    def request(
        self, method: str, url: str, *, json: Any = None, params: Mapping[str, str] | None = None, timeout: Any = None
    ) -> Reply:
        process, random = self.process, self.process.world.random
        outage = process.check("api")
        time = self.cloud.time()
        if outage is not None:
            if outage.kind == "down" and random.random() < 0.3:
                raise ConnectionError("the connection is closed")
            if outage.kind not in ("odd", "pages"):
                status, name = {"denied": (403, "PERMISSION_DENIED"), "login": (401, "UNAUTHENTICATED")}.get(
                    outage.kind, (503, "UNAVAILABLE")
                )
                return Reply(status, {"error": {"status": name, "message": "refused"}}, time)
        path = url.removeprefix(BASE)
        status, content = self._answer(method, path, json or {}, dict(params or {}))
        if process.is_killed:  # its machine was deleted
            process.answer("api")
        if outage is not None and outage.kind == "pages":
            return Reply(status, {**content, "nextPageToken": "again"}, time)
        is_odd = outage is not None or (process.faults.odd and random.random() < process.faults.odd)
        if is_odd:
            process.world.fault("answers of the wrong shape")
            content = self._odd(content)
        if process.faults.lost and random.random() < process.faults.lost:
            process.world.fault("lost answers")
            raise ConnectionError("the answer is lost")
        return Reply(status, content, time)

    def _odd(self, content: Any) -> Any:
        """Return an answer of the wrong shape."""
        random = self.process.world.random
        kind = random.randrange(5)
        if kind == 0:
            return random.choice((None, [], "text", 5, ValueError("not JSON")))
        # Replace one value, at any depth, by one of another type.
        content = copy.deepcopy(content)
        holder, key = content, None
        while isinstance(holder, dict | list) and holder:
            keys = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = random.choice(keys)
            value = holder[key]
            if not isinstance(value, dict | list) or not value or random.random() < 0.4:
                holder[key] = random.choice([odd for odd in ODD if type(odd) is not type(value)])
                break
            holder = value
        return content

    def _answer(self, method: str, path: str, body: Json, params: Json) -> tuple[int, Any]:
        segments = path.split("/")
        if len(segments) < 6 or segments[3] != "locations":
            return 404, {"error": {"status": "NOT_FOUND", "message": "not found"}}
        zone, kind, name = segments[4], segments[5], "/".join(segments[6:])
        if method == "GET" and not name:
            return 200, self._list(kind, zone)
        if method == "POST" and name.endswith(":getGuestAttributes"):
            machine = self.cloud.find(name.removesuffix(":getGuestAttributes"), zone)
            return self._guest_attributes(machine)
        if method == "POST":
            return self._create(kind, zone, body, params)
        target = self.cloud.find(name, zone)
        resource = None if target is None else (queued(target) if kind == "queuedResources" else node(target))
        if target is None or resource is None:
            return 404, {"error": {"status": "NOT_FOUND", "message": f"{name} was not found"}}
        if method == "DELETE":
            self.cloud.delete(target, self.process.name)
            return 200, {"name": f"{_parent(zone)}/operations/delete-{name}", "done": True}
        target.see(self.process)
        return 200, resource

    def _list(self, kind: str, zone: str) -> Json:
        machines = [machine for machine in self.cloud.machines if machine.provider == "tpu"]
        machines = [machine for machine in machines if zone in ("-", machine.request.zone)]
        if kind == "operations":
            return {"operations": [operation for machine in machines for operation in operations(machine, self.cloud)]}
        show = queued if kind == "queuedResources" else node
        resources = [show(machine) for machine in machines if machine.is_listed]
        return {kind: [resource for resource in resources if resource is not None]}

    def _guest_attributes(self, machine: Machine | None) -> tuple[int, Any]:
        if machine is None or not machine.runs:
            return 404, {"error": {"status": "NOT_FOUND", "message": "the node does not run"}}
        item = {"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}
        return 200, {"guestAttributes": [{"queryValue": {"items": [item]}} for _ in range(machine.hosts)]}

    def _create(self, kind: str, zone: str, body: Json, params: Json) -> tuple[int, Any]:
        name = params["queuedResourceId" if kind == "queuedResources" else "nodeId"]
        spec = body["tpu"]["nodeSpec"][0]["node"] if kind == "queuedResources" else body
        if self.cloud.find(name, zone) is not None:
            return 409, {"error": {"status": "ALREADY_EXISTS", "message": "it exists"}}
        limit = (body.get("runDuration") or {}).get("maxRunDuration")
        request = SliceRequest(
            name,
            slice_of(spec),
            zone,
            spec["labels"].get(labels.CAPACITY, "on-demand"),
            spec["labels"],
            spec["metadata"],
            params.get("requestId", ""),
            limit_seconds=None if limit is None else int(limit.removesuffix("s")),
        )
        try:
            self.cloud.create(request, "tpu")
        except RequestRefused:
            return 429, {"error": {"status": "RESOURCE_EXHAUSTED", "message": "no more capacity in the zone"}}
        return 200, {"name": f"{_parent(zone)}/operations/create-{name}", "done": False}


def _parent(zone: str) -> str:
    return f"projects/{PROJECT}/locations/{zone}"


def _timestamp(time: float) -> str:
    return dt.datetime.fromtimestamp(time, dt.UTC).isoformat().replace("+00:00", "Z")


def _spec(machine: Machine) -> Json:
    request = machine.request
    return {
        "acceleratorType": request.slice,
        "labels": dict(request.labels),
        "metadata": dict(request.metadata),
        "schedulingConfig": {"spot": request.capacity == "spot"},
    }


def queued(machine: Machine) -> Json | None:
    """Return the queued resource of a machine as the API shows it."""
    request = machine.request
    resource: Json = {
        "name": f"{_parent(request.zone)}/queuedResources/{request.name}",
        "state": {"state": QUEUE_STATES.get(machine.state, "SUSPENDED")},
        "tpu": {"nodeSpec": [{"parent": _parent(request.zone), "nodeId": request.name, "node": _spec(machine)}]},
        "createTime": _timestamp(machine.requested_at),
    }
    return {**resource, "spot": {}} if request.capacity == "spot" else resource


def node(machine: Machine) -> Json | None:
    """Return the node of a machine as the API shows it, or None before it exists."""
    if machine.ready_at is None:
        return None
    ends = [{"ipAddress": f"10.0.0.{host}"} for host in range(machine.hosts)]
    return {
        "name": f"{_parent(machine.request.zone)}/nodes/{machine.request.name}",
        "state": "READY" if machine.runs else "PREEMPTED",
        **_spec(machine),
        "createTime": _timestamp(machine.ready_at),
        "networkEndpoints": ends,
    }


def operations(machine: Machine, cloud: Cloud) -> list[Json]:
    """Return the operations on a machine, if the API of the simulation tells times."""
    if not cloud.tells_times or machine.ready_at is None:
        return []
    zone, name = machine.request.zone, machine.request.name
    target = {"target": f"{_parent(zone)}/nodes/{name}"}
    listed = [
        {
            "name": f"{_parent(zone)}/operations/create-{name}",
            "done": True,
            "metadata": {**target, "verb": "create", "createTime": _timestamp(machine.requested_at)}
            | {"endTime": _timestamp(machine.ready_at)},
        }
    ]
    if not machine.is_listed and machine.gone_at is not None and not machine.is_preempted:
        end = {"createTime": _timestamp(machine.gone_at), "endTime": _timestamp(machine.gone_at)}
        name = f"{_parent(zone)}/operations/delete-{name}"
        listed.append({"name": name, "done": True, "metadata": {**target, "verb": "delete", **end}})
    return listed
