"""The provider of TPU slices against the fake of the API, which has its own state machines, clock and bill."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fake import FakeCloud, Fault

from forerun.cloud.provider import Failure, RequestRefused, SliceRequest, SliceState, ZonesUnreachable
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
NAME = REQUEST.name
CREATE, DELETE = 30.0, 10.0


@pytest.fixture(scope="module")
def process() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(process: FakeCloud) -> FakeCloud:
    process.control("reset")
    process.set_delays(create=CREATE, delete=DELETE, queue=0.0)
    return process


def provider_of(cloud: FakeCloud) -> TpuProvider:
    """Return a provider as a new process would have it. It waits by the fake's clock."""
    rest = google_rest(environment=cloud.environment())
    rest.sleep = cloud.advance
    return TpuProvider(rest)


@pytest.fixture
def provider(cloud: FakeCloud) -> TpuProvider:
    return provider_of(cloud)


def request_with(**changes: Any) -> SliceRequest:
    return dataclasses.replace(REQUEST, **changes)


@pytest.mark.parametrize("capacity", ["on-demand", "spot", "flex-start"])
def test_a_slice_lives_and_its_times_are_those_of_the_bill(
    cloud: FakeCloud, provider: TpuProvider, capacity: Any
) -> None:
    start = cloud.now()
    provider.create(request_with(capacity=capacity, limit_seconds=86400))
    assert provider.status(NAME, ZONE).state in (SliceState.CREATING, SliceState.WAITING)
    cloud.advance(CREATE)
    provider.status(NAME, ZONE)  # the fake advances queued requests at each request
    cloud.advance(CREATE)
    status = provider_of(cloud).status(NAME, ZONE)
    assert status.state is SliceState.READY
    hosts = provider.addresses(NAME, ZONE)
    assert [host.index for host in hosts] == [0, 1, 2, 3]
    cloud.advance(3600)
    end = provider.delete(NAME, ZONE)
    (rental,) = cloud.rentals()
    assert (status.ready_at, end) == (rental["ready_at"], rental["ended_at"])
    assert status.ready_at is not None
    assert status.ready_at >= start + CREATE
    assert cloud.resources() == []
    # Another process that comes later finds the same end.
    assert provider_of(cloud).delete(NAME, ZONE) == end
    assert provider.status(NAME, ZONE).state is SliceState.ABSENT


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_a_second_request_creates_no_second_slice(cloud: FakeCloud, provider: TpuProvider, capacity: Any) -> None:
    for _ in range(2):
        provider_of(cloud).create(request_with(capacity=capacity))
    cloud.advance(CREATE)
    provider.status(NAME, ZONE)
    cloud.advance(CREATE)
    assert len(cloud.rentals()) == 1
    kinds = [(found.kind, found.name, found.zone, found.slice, found.capacity) for found in provider.list()]
    node = ("node", NAME, ZONE, "v6e-16", capacity)
    assert kinds == ([node] if capacity == "on-demand" else [node, ("queued resource", *node[1:])])


@pytest.mark.parametrize("kind", ["lost", "duplicate", "error", "refuse"])
@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_faults_of_the_network_leave_one_slice_and_then_none(
    cloud: FakeCloud, provider: TpuProvider, kind: Any, capacity: Any
) -> None:
    cloud.inject(Fault(kind, method="POST"))
    provider.create(request_with(capacity=capacity))
    cloud.advance(CREATE)
    provider.status(NAME, ZONE)
    cloud.advance(CREATE)
    assert [one["name"] for one in cloud.rentals()] == [NAME]
    cloud.inject(Fault(kind, method="DELETE"))
    provider.delete(NAME, ZONE)
    assert cloud.resources() == []


def test_no_capacity_is_reported_inside_the_operation(cloud: FakeCloud, provider: TpuProvider) -> None:
    cloud.set_capacity(ZONE, "v6e-16", 0)
    provider.create(REQUEST)  # accepted
    cloud.advance(CREATE)
    status = provider_of(cloud).status(NAME, ZONE)
    assert (status.state, status.failure) == (SliceState.FAILED, Failure.CAPACITY)
    assert provider.delete(NAME, ZONE) is None


def test_a_queued_request_waits_and_expires(cloud: FakeCloud, provider: TpuProvider) -> None:
    cloud.set_capacity(ZONE, "v6e-16", 0)
    provider.create(request_with(capacity="spot", wait_seconds=600))
    cloud.advance(599)
    assert provider.status(NAME, ZONE).state is SliceState.WAITING
    cloud.advance(2)
    status = provider.status(NAME, ZONE)
    assert (status.state, status.failure) == (SliceState.FAILED, Failure.CAPACITY)
    provider.delete(NAME, ZONE)
    assert cloud.resources() == []


@pytest.mark.parametrize("shown", ["PREEMPTED", "STOPPED", "TERMINATED", "REPAIRING", "HIDDEN"])
def test_a_preempted_slice_is_seen_in_any_state_and_leaves_nothing(
    cloud: FakeCloud, provider: TpuProvider, shown: str
) -> None:
    cloud.set(preempted_state=shown)
    provider.create(request_with(capacity="spot"))
    cloud.advance(CREATE)
    provider.status(NAME, ZONE)
    cloud.advance(CREATE)
    cloud.preempt(NAME)
    assert provider.status(NAME, ZONE).state is SliceState.PREEMPTED
    assert len(cloud.resources()) == 2  # the node and its request remain, with name and quota
    assert provider.delete(NAME, ZONE) is None  # the API does not tell when billing ended
    assert cloud.resources() == []


def test_a_slice_can_be_deleted_while_it_is_created(cloud: FakeCloud, provider: TpuProvider) -> None:
    for capacity in ("on-demand", "spot"):
        provider.create(request_with(name=f"forerun-{capacity}", capacity=capacity))
        cloud.advance(CREATE / 2)
        provider.delete(f"forerun-{capacity}", ZONE)
    cloud.advance(10 * CREATE)
    assert cloud.resources() == []
    assert all(not cost for cost in cloud.bill().values())


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"zone": "europe-west4-z"}, Failure.PERMISSION),
        ({"image": "no-such-image"}, Failure.INVALID),
        ({"labels": {"Bad Label": "x"}}, Failure.INVALID),
    ],
)
def test_a_refused_request_says_why(cloud: FakeCloud, provider: TpuProvider, changes: Any, failure: Failure) -> None:
    with pytest.raises(RequestRefused) as caught:
        provider.create(request_with(**changes))
    assert caught.value.failure is failure
    assert cloud.resources() == []
    # Nothing is left in a zone that does not exist.
    assert provider.delete(NAME, str(changes.get("zone", ZONE))) is None


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_quota_differs_from_capacity(cloud: FakeCloud, provider: TpuProvider, capacity: Any) -> None:
    cloud.set_quota(ZONE, "v6e", 8, spot=capacity == "spot")
    with pytest.raises(RequestRefused) as caught:
        provider.create(request_with(capacity=capacity))
    assert caught.value.failure is Failure.QUOTA


def test_the_api_limits_only_flex_start(cloud: FakeCloud, provider: TpuProvider) -> None:
    assert not provider.enforces_limit(request_with(capacity="spot", limit_seconds=600))
    assert not provider.enforces_limit(request_with(capacity="flex-start"))
    limited = request_with(capacity="flex-start", limit_seconds=600)
    assert provider.enforces_limit(limited)
    provider.create(limited)
    cloud.advance(CREATE)
    provider.status(NAME, ZONE)
    cloud.advance(CREATE + 600 + DELETE)
    assert provider.status(NAME, ZONE).state is SliceState.STOPPED
    (rental,) = cloud.rentals()
    assert 600 <= rental["ended_at"] - rental["ready_at"] <= 600 + DELETE


def test_a_dry_run_shows_what_is_sent(cloud: FakeCloud, provider: TpuProvider) -> None:
    request = request_with(capacity="spot")
    shown = provider.requests(request)
    assert cloud.requests() == []
    provider.create(request)
    sent = [(one["method"], one["path"], one["body"]) for one in cloud.requests()]
    assert [
        (one["method"], str(one["url"]).split(str(cloud.port))[1].split("?")[0], one["body"]) for one in shown
    ] == sent


def test_the_clock_is_the_clouds(cloud: FakeCloud, provider: TpuProvider) -> None:
    cloud.advance(10 * 365 * 86400)
    assert abs(provider.now() - cloud.now()) < 60


def test_a_missing_permission_is_for_the_user(cloud: FakeCloud, provider: TpuProvider) -> None:
    denied = Fault("error", method="GET", http=403, message="The caller does not have permission", count=99)
    cloud.inject(denied)
    for action in (provider.list, lambda: provider.status(NAME, ZONE), lambda: provider.delete(NAME, ZONE)):
        with pytest.raises(UserError) as caught:
            action()
        assert caught.value.code == "E-CLOUD-016"
    cloud.clear_faults()


class PartialRest:
    """A client whose lists omit one zone."""

    project = "p"

    def pages(self, api: str, path: str) -> Iterator[dict[str, Any]]:
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
