"""The provider of TPU slices against the fake of the API, which has its own state machines, clock and bill."""

import dataclasses
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fake import FakeCloud, Fault

from forerun.cloud.google.api_error import ApiError
from forerun.cloud.provider import Failure, RequestRefused, SliceRequest, SliceState, SliceStatus, ZonesUnreachable
from forerun.cloud.providers import google_rest
from forerun.cloud.tpu.tpu_provider import TpuProvider
from forerun.errors import UserError

ZONE = "us-east5-b"
REQUEST = SliceRequest(
    name="forerun-run-1",
    slice="v6e-16",
    zone=ZONE,
    capacity="on-demand",
    labels={"forerun-run": "run", "forerun-attempt": "1"},
    metadata={"startup-script": "true"},
    request_id="5b1d1c5e-0000-4000-8000-000000000001",
)
CREATE, DELETE = 30.0, 10.0


_numbers = itertools.count(1)


class Scene:
    """One process of the fake serves all tests of the module, and each test has its own name of a slice."""

    def __init__(self, cloud: FakeCloud) -> None:
        self.cloud, self.name = cloud, f"forerun-run-{next(_numbers)}"
        self.provider = self.new_provider()

    def new_provider(self) -> TpuProvider:
        """Return a provider as a new process would have it. It waits by the fake's clock."""
        rest = google_rest(environment=self.cloud.environment())
        rest.sleep = self.cloud.advance
        return TpuProvider(rest)

    def request(self, **changes: Any) -> SliceRequest:
        return dataclasses.replace(REQUEST, **{"name": self.name, "request_id": str(uuid.uuid4()), **changes})

    def status(self) -> SliceStatus:
        return self.provider.status(self.name, ZONE)

    def become_ready(self) -> None:
        self.cloud.advance(CREATE)
        self.status()  # the fake serves its queue between two requests
        self.cloud.advance(CREATE)
        assert self.status().state is SliceState.READY

    def rentals(self) -> list[dict[str, Any]]:
        return [one for one in self.cloud.rentals() if one["name"].startswith(self.name)]

    def resources(self) -> list[dict[str, Any]]:
        return [one for one in self.cloud.resources() if one["name"].startswith(self.name)]


@pytest.fixture(scope="module")
def process() -> Iterator[FakeCloud]:
    with FakeCloud(create_seconds=CREATE, delete_seconds=DELETE) as cloud:
        yield cloud


@pytest.fixture
def scene(process: FakeCloud) -> Iterator[Scene]:
    scene = Scene(process)
    yield scene
    process.clear_faults()
    process.set(preempted_state="PREEMPTED")
    process.set_capacity(ZONE, "v6e-16", None)
    for spot in (False, True):
        process.set_quota(ZONE, "v6e", None, spot=spot)
    for left in {one["name"] for one in scene.resources()}:
        scene.provider.delete(left, ZONE)
    process.advance(3600)


@pytest.mark.parametrize("capacity", ["on-demand", "spot", "flex-start"])
def test_a_slice_lives_and_its_times_are_those_of_the_bill(scene: Scene, capacity: Any) -> None:
    start = scene.cloud.now()
    scene.provider.create(scene.request(capacity=capacity, limit_seconds=86400))
    assert scene.status().state in (SliceState.CREATING, SliceState.WAITING)
    scene.become_ready()
    ready_at = scene.new_provider().status(scene.name, ZONE).ready_at
    assert [host.index for host in scene.provider.addresses(scene.name, ZONE)] == [0, 1, 2, 3]
    scene.cloud.advance(3600)
    end = scene.provider.delete(scene.name, ZONE)
    (rental,) = scene.rentals()
    # Timestamps of the API have microseconds.
    assert (ready_at, end) == pytest.approx((rental["ready_at"], rental["ended_at"]), abs=1e-3)
    assert ready_at is not None
    assert ready_at >= start + CREATE
    assert scene.resources() == []
    # Another process that comes later finds the same end.
    assert scene.new_provider().delete(scene.name, ZONE) == end
    gone = scene.new_provider().status(scene.name, ZONE)
    assert (gone.state, gone.ready_at, gone.ended_at) == (SliceState.ABSENT, ready_at, end)


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_a_second_request_creates_no_second_slice(scene: Scene, capacity: Any) -> None:
    for _ in range(2):
        scene.new_provider().create(scene.request(capacity=capacity))
    scene.become_ready()
    assert len(scene.rentals()) == 1
    kinds = [(found.kind, found.name, found.zone, found.slice, found.capacity) for found in scene.provider.list()]
    node = ("node", scene.name, ZONE, "v6e-16", capacity)
    assert kinds == ([node] if capacity == "on-demand" else [node, ("queued resource", *node[1:])])


@pytest.mark.parametrize("kind", ["lost", "duplicate", "error", "refuse"])
@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_faults_of_the_network_leave_one_slice_and_then_none(scene: Scene, kind: Any, capacity: Any) -> None:
    scene.cloud.inject(Fault(kind, method="POST", path="/v2"))
    scene.provider.create(scene.request(capacity=capacity))
    scene.become_ready()
    assert len(scene.rentals()) == 1
    scene.cloud.inject(Fault(kind, method="DELETE"))
    scene.provider.delete(scene.name, ZONE)
    assert scene.resources() == []


def test_no_capacity_is_reported_inside_the_operation(scene: Scene) -> None:
    scene.cloud.set_capacity(ZONE, "v6e-16", 0)
    scene.provider.create(scene.request())  # accepted
    scene.cloud.advance(CREATE)
    status = scene.new_provider().status(scene.name, ZONE)
    assert (status.state, status.failure) == (SliceState.FAILED, Failure.CAPACITY)
    assert status.ended_at == pytest.approx(scene.cloud.now(), abs=1e-3)
    assert scene.provider.delete(scene.name, ZONE) is None


def test_an_earlier_slice_with_the_same_name_is_not_taken_for_the_new_one(scene: Scene) -> None:
    scene.provider.create(scene.request())
    scene.become_ready()
    old = scene.provider.delete(scene.name, ZONE)
    scene.cloud.advance(3600)
    scene.provider.create(scene.request())
    scene.become_ready()
    scene.cloud.advance(60)
    status = scene.new_provider().status(scene.name, ZONE)
    new = scene.provider.delete(scene.name, ZONE)
    assert old is not None
    assert new is not None
    assert status.ready_at is not None
    assert old < status.ready_at < new
    # The third creation fails, so its deletion has no time.
    scene.cloud.set_capacity(ZONE, "v6e-16", 0)
    scene.provider.create(scene.request())
    scene.cloud.advance(CREATE)
    assert scene.provider.delete(scene.name, ZONE) is None


def test_a_queued_request_waits_and_expires(scene: Scene) -> None:
    scene.cloud.set_capacity(ZONE, "v6e-16", 0)
    scene.provider.create(scene.request(capacity="spot", wait_seconds=600))
    scene.cloud.advance(599)
    assert scene.status().state is SliceState.WAITING
    scene.cloud.advance(2)
    assert (scene.status().state, scene.status().failure) == (SliceState.FAILED, Failure.CAPACITY)
    scene.provider.delete(scene.name, ZONE)
    assert scene.resources() == []


@pytest.mark.parametrize("shown", ["PREEMPTED", "STOPPED", "TERMINATED", "REPAIRING", "HIDDEN"])
def test_a_preempted_slice_is_seen_in_any_state_and_leaves_nothing(scene: Scene, shown: str) -> None:
    scene.cloud.set(preempted_state=shown)
    scene.provider.create(scene.request(capacity="spot"))
    scene.become_ready()
    scene.cloud.preempt(scene.name)
    assert scene.status().state is SliceState.PREEMPTED
    assert len(scene.resources()) == 2  # the node and its request remain, with name and quota
    assert scene.provider.delete(scene.name, ZONE) is None  # the API does not tell when billing ended
    assert scene.resources() == []


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_a_slice_can_be_deleted_while_it_is_created(scene: Scene, capacity: Any) -> None:
    scene.provider.create(scene.request(capacity=capacity))
    scene.cloud.advance(CREATE / 2)
    scene.provider.delete(scene.name, ZONE)
    scene.cloud.advance(10 * CREATE)
    assert scene.resources() == []
    assert not scene.cloud.bill().get(scene.name)


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"zone": "europe-west4-z"}, Failure.PERMISSION),
        ({"image": "no-such-image"}, Failure.INVALID),
        ({"labels": {"Bad Label": "x"}}, Failure.INVALID),
    ],
)
def test_a_refused_request_says_why(scene: Scene, changes: Any, failure: Failure) -> None:
    with pytest.raises(RequestRefused) as caught:
        scene.provider.create(scene.request(**changes))
    assert caught.value.failure is failure
    assert scene.resources() == []
    # Nothing is left in a zone that does not exist.
    assert scene.provider.delete(scene.name, str(changes.get("zone", ZONE))) is None


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_quota_differs_from_capacity(scene: Scene, capacity: Any) -> None:
    scene.cloud.set_quota(ZONE, "v6e", 8, spot=capacity == "spot")
    with pytest.raises(RequestRefused) as caught:
        scene.provider.create(scene.request(capacity=capacity))
    assert caught.value.failure is Failure.QUOTA


def test_the_api_limits_only_flex_start(scene: Scene) -> None:
    assert not scene.provider.enforces_limit(scene.request(capacity="spot", limit_seconds=600))
    assert not scene.provider.enforces_limit(scene.request(capacity="flex-start"))
    limited = scene.request(capacity="flex-start", limit_seconds=600)
    assert scene.provider.enforces_limit(limited)
    scene.provider.create(limited)
    scene.become_ready()
    scene.cloud.advance(600 + DELETE)
    assert scene.status().state is SliceState.STOPPED
    (rental,) = scene.rentals()
    assert 600 <= rental["ended_at"] - rental["ready_at"] <= 600 + DELETE


def test_a_dry_run_shows_what_is_sent(scene: Scene) -> None:
    request = scene.request(capacity="spot")
    before = len(scene.cloud.requests())
    (shown,) = scene.provider.requests(request)
    assert len(scene.cloud.requests()) == before
    scene.provider.create(request)
    sent = scene.cloud.requests()[before]
    assert (shown["method"], shown["body"]) == (sent["method"], sent["body"])
    assert str(shown["url"]).split("?")[0].endswith(sent["path"])


def test_the_clock_is_the_clouds(scene: Scene) -> None:
    scene.cloud.advance(365 * 86400)
    assert abs(scene.provider.now() - scene.cloud.now()) < 60


def test_a_missing_permission_is_for_the_user(scene: Scene) -> None:
    scene.cloud.inject(Fault("error", method="GET", http=403, message="The caller does not have permission", count=99))
    actions = (
        scene.provider.list,
        scene.status,
        lambda: scene.provider.delete(scene.name, ZONE),
    )
    for action in actions:
        with pytest.raises(UserError) as caught:
            action()
        assert caught.value.code == "E-CLOUD-016"


class AttributeRest:
    """A client whose node has two hosts with guest attributes."""

    project = "p"

    def __init__(self, *hosts: dict[str, str]) -> None:
        self.hosts = hosts

    def call(
        self, method: str, api: str, path: str, body: Any = None, params: Any = None, shape: Any = None
    ) -> dict[str, Any]:
        if path.endswith(":getGuestAttributes"):
            items = [[{"key": key, "value": value} for key, value in host.items()] for host in self.hosts]
            return {"guestAttributes": [{"queryValue": {"items": one}} for one in items]}
        outside = [{"accessConfig": {"externalIp": "203.0.113.1"}}, {}]
        return {"networkEndpoints": [{"ipAddress": f"10.0.0.{index}", **outside[index]} for index in range(2)]}


def test_host_keys_and_instance_names_come_from_guest_attributes() -> None:
    complete = [{"ssh-ed25519": f"AAAA{index}", "hostname": f"t1v-w-{index}"} for index in range(2)]
    provider = TpuProvider(AttributeRest(*complete))  # type: ignore[arg-type]
    assert provider.host_keys("n", ZONE) == [["ssh-ed25519 AAAA0"], ["ssh-ed25519 AAAA1"]]
    found = [(host.address, host.internal, host.instance) for host in provider.addresses("n", ZONE)]
    assert found == [("203.0.113.1", "10.0.0.0", "t1v-w-0"), ("10.0.0.1", "10.0.0.1", "t1v-w-1")]


@pytest.mark.parametrize("hosts", [(), ({"ssh-ed25519": "A"},), ({"ssh-ed25519": "A"}, {"hostname": "x"})])
def test_host_keys_are_complete_or_absent(hosts: Any) -> None:
    assert TpuProvider(AttributeRest(*hosts)).host_keys("n", ZONE) == []  # type: ignore[arg-type]


class LateRest:
    """A client whose node becomes visible only some polls after the creation was accepted."""

    project = "p"

    def __init__(self, polls: int) -> None:
        self.polls, self.deleted = polls, False

    def sleep(self, seconds: float) -> None:
        self.polls -= 1

    def call(
        self, method: str, api: str, path: str, body: Any = None, params: Any = None, shape: Any = None
    ) -> dict[str, Any]:
        if method == "DELETE":
            self.deleted = True
            return {"name": "d", "done": True}
        if path.endswith("/nodes/n") and self.polls <= 0 and not self.deleted:
            return {"name": f"projects/p/locations/{ZONE}/nodes/n", "state": "READY"}
        raise ApiError(404, 5, "", "absent")

    def pages(self, api: str, path: str, params: Any = None, shape: Any = None) -> Iterator[dict[str, Any]]:
        metadata = {"target": f"projects/1/locations/{ZONE}/nodes/n", "verb": "create"}
        created = {"name": "c", "done": self.polls <= 0, "metadata": metadata | {"createTime": "2026-11-18T12:00:00Z"}}
        yield {"operations": [created]}


def test_a_creation_that_has_not_ended_is_neither_absent_nor_forgotten() -> None:
    rest = LateRest(3)
    provider = TpuProvider(rest)  # type: ignore[arg-type]
    assert provider.status("n", ZONE).state is SliceState.CREATING
    provider.delete("n", ZONE)
    assert rest.deleted


class DeniedRest(LateRest):
    """A client that may do nothing. Its text is that of a zone that does not exist, or another one."""

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self.text = text

    def call(
        self, method: str, api: str, path: str, body: Any = None, params: Any = None, shape: Any = None
    ) -> dict[str, Any]:
        raise ApiError(403, 7, "", self.text)

    def pages(self, api: str, path: str, params: Any = None, shape: Any = None) -> Iterator[dict[str, Any]]:
        raise ApiError(403, 7, "", self.text)
        yield


def test_nothing_exists_in_a_zone_that_does_not_exist() -> None:
    text = f"Permission denied on 'locations/{ZONE}' (or it may not exist)."
    assert TpuProvider(DeniedRest(text)).status("n", ZONE).state is SliceState.ABSENT  # type: ignore[arg-type]
    with pytest.raises(UserError):
        TpuProvider(DeniedRest("The caller does not have permission")).status("n", ZONE)  # type: ignore[arg-type]


class PartialRest:
    """A client whose lists omit one zone."""

    project = "p"

    def pages(self, api: str, path: str, params: Any = None, shape: Any = None) -> Iterator[dict[str, Any]]:
        kind = path.split("/")[-1]
        node = {"name": f"projects/p/locations/a/{kind}/n", "labels": {"forerun-run": "r"}, "state": "READY"}
        if "/locations/-/" in path:
            yield {kind: [node] if kind == "nodes" else [], "unreachable": ["projects/p/locations/b", "c"]}
        elif "/locations/b/" in path:
            yield {kind: []}
        else:
            yield {"unreachable": ["c"]}


def test_a_zone_that_does_not_answer_is_not_forgotten() -> None:
    with pytest.raises(ZonesUnreachable) as caught:
        TpuProvider(PartialRest()).list()  # type: ignore[arg-type]
    assert caught.value.zones == ("c",)
    assert [found.name for found in caught.value.resources] == ["n"]
