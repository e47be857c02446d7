"""The provider of Compute Engine on the fake cloud. The oracle is what exists in the fake, and its bill."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cloud_in_process import PROJECT, CloudInProcess
from fake.faults import Fault

from forerun.cloud import labels
from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.provider import Failure, Provider, RequestRefused, SliceRequest, SliceState
from forerun.errors import UserError

ZONE = "us-east5-a"
NAME = "forerun-a-1"
ONE = SliceRequest(
    name=NAME,
    slice="v6e-8",
    zone=ZONE,
    capacity="on-demand",
    labels=labels.slice_labels("a", 1),
    metadata={labels.FOLDER: "gs://b/a", labels.MAX_USD: "40", "startup-script": "#!/bin/sh\n"},
    request_id=labels.request_id("gs://b/a", 1, "slice"),
    limit_seconds=3600,
)
FOUR = replace(ONE, slice="v6e-16")
SECOND = replace(
    FOUR,
    name="forerun-a-2",
    labels=labels.slice_labels("a", 2),
    request_id=labels.request_id("gs://b/a", 2, "slice"),
)
HOURLY_USD = {"v6e-8": 8 * 2.7, "v6e-16": 16 * 2.7}  # prices.csv: 2.7 per chip in us-east5-a


@pytest.fixture
def cloud() -> CloudInProcess:
    return CloudInProcess()


@pytest.fixture
def provider(cloud: CloudInProcess) -> ComputeProvider:
    return ComputeProvider(cloud.rest)


def state(provider: ComputeProvider, name: str = NAME, zone: str = ZONE) -> SliceState:
    return provider.status(name, zone).state


def test_it_is_a_provider(provider: ComputeProvider) -> None:
    as_provider: Provider = provider
    assert as_provider.name == "compute"
    assert provider.enforces_limit(ONE)
    assert not provider.enforces_limit(replace(ONE, limit_seconds=None))


@pytest.mark.parametrize("request_", [ONE, FOUR], ids=["one host", "four hosts"])
def test_a_slice_from_its_request_to_its_end(
    cloud: CloudInProcess, provider: ComputeProvider, request_: SliceRequest
) -> None:
    assert state(provider) is SliceState.ABSENT
    provider.create(request_)
    cloud.world.settle()
    ready = provider.status(NAME, ZONE)
    assert ready.state is SliceState.READY
    assert ready.ready_at == cloud.world.now()
    cloud.world.advance(1800)
    assert provider.delete(NAME, ZONE) == cloud.world.now()
    assert state(provider) is SliceState.ABSENT
    assert cloud.names() == set()
    assert cloud.world.bill()[NAME] == pytest.approx(HOURLY_USD[request_.slice] / 2)


def test_a_group_has_its_template_and_policy(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    provider.create(FOUR)
    cloud.world.settle()
    kinds = {kind for kind, name in cloud.names() if name == NAME}
    assert kinds == {"instance group", "template", "policy"}
    assert {name for kind, name in cloud.names() if kind == "instance"} == {
        f"{NAME}-0{index}" for index in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("request_", [ONE, FOUR], ids=["one host", "four hosts"])
def test_a_second_request_creates_nothing(
    cloud: CloudInProcess, provider: ComputeProvider, request_: SliceRequest
) -> None:
    provider.create(request_)
    cloud.world.settle()
    before = cloud.names()
    provider.create(request_)
    provider.create(replace(request_, request_id="another"))
    cloud.world.settle()
    assert cloud.names() == before
    assert len(cloud.world.rentals) == 1


def test_a_name_of_another_run_is_refused(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    for request in (ONE, SECOND):
        provider.create(request)
        other = replace(request, request_id="other", metadata={labels.FOLDER: "gs://b/other"})
        with pytest.raises(UserError) as caught:
            provider.create(other)
        assert caught.value.code == "E-CLOUD-022"


def test_the_dry_run_shows_what_is_sent(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    for request in (ONE, SECOND):
        shown = provider.requests(request)
        assert all(str(one["url"]).startswith(f"http://fake/compute/v1/projects/{PROJECT}/") for one in shown)
        before = len(cloud.server.log)
        provider.create(request)
        sent = [one for one in cloud.server.log[before:] if one["method"] == "POST"]
        assert [one["body"] for one in sent] == [one["body"] for one in shown]


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
@pytest.mark.parametrize("slice", ["v6e-8", "v6e-16"])
def test_no_capacity_is_a_failure(cloud: CloudInProcess, provider: ComputeProvider, slice: str, capacity: Any) -> None:
    """The error is inside a finished operation, or in the entries of the group."""
    cloud.control("capacity", zone=ZONE, slice=slice, count=0)
    provider.create(replace(ONE, slice=slice, capacity=capacity))
    cloud.world.settle()
    found = provider.status(NAME, ZONE)
    assert (found.state, found.failure) == (SliceState.FAILED, Failure.CAPACITY)
    provider.delete(NAME, ZONE)
    assert cloud.names() == set()
    assert sum(cloud.world.bill().values()) == 0


@pytest.mark.parametrize("slice", ["v6e-8", "v6e-16"])
def test_no_quota_is_a_failure(cloud: CloudInProcess, provider: ComputeProvider, slice: str) -> None:
    cloud.control("quota", zone=ZONE, generation="v6e", spot=False, chips=4)
    provider.create(replace(ONE, slice=slice))
    cloud.world.settle()
    found = provider.status(NAME, ZONE)
    assert (found.state, found.failure) == (SliceState.FAILED, Failure.QUOTA)


@pytest.mark.parametrize("slice", ["v6e-8", "v6e-16"])
def test_a_flex_start_request_waits_for_capacity(cloud: CloudInProcess, provider: ComputeProvider, slice: str) -> None:
    cloud.control("capacity", zone=ZONE, slice=slice, count=0)
    provider.create(replace(ONE, slice=slice, capacity="flex-start", wait_seconds=7200))
    cloud.world.advance(3600)
    assert state(provider) is SliceState.WAITING
    cloud.control("capacity", zone=ZONE, slice=slice, count=1)
    cloud.world.advance(1)
    assert state(provider) is SliceState.READY
    cloud.world.advance(3600)  # the limit counts from here, not from the request
    assert cloud.world.bill()[NAME] > 0
    assert state(provider) in (SliceState.ABSENT, SliceState.STOPPED)


def test_a_zone_without_the_machine_is_not_an_invalid_request(provider: ComputeProvider) -> None:
    with pytest.raises(RequestRefused) as caught:
        provider.create(replace(ONE, zone="us-central2-b"))
    assert caught.value.failure is Failure.PERMISSION


def test_an_invalid_request_is_never_repeated(provider: ComputeProvider) -> None:
    with pytest.raises(RequestRefused) as caught:
        provider.create(replace(ONE, labels={"Bad Label": "x"}))
    assert caught.value.failure is Failure.INVALID


@pytest.mark.parametrize("slice", ["v6e-8", "v6e-16"])
def test_preemption(cloud: CloudInProcess, provider: ComputeProvider, slice: str) -> None:
    """Preempted machines are deleted, so that a single one leaves only an operation."""
    provider.create(replace(ONE, slice=slice, capacity="spot"))
    cloud.world.settle()
    cloud.world.advance(600)
    taken_at = cloud.world.now()
    assert cloud.control("preempt", name=NAME, notice_seconds=0)
    found = provider.status(NAME, ZONE)
    assert found.state is (SliceState.ABSENT if slice == "v6e-8" else SliceState.PREEMPTED)
    assert (found.ready_at, found.ended_at) == (taken_at - 600, taken_at)
    cloud.world.advance(600)
    assert provider.delete(NAME, ZONE) == taken_at
    assert cloud.names() == set()


@pytest.mark.parametrize("slice", ["v6e-8", "v6e-16"])
def test_the_api_enforces_the_limit(cloud: CloudInProcess, provider: ComputeProvider, slice: str) -> None:
    provider.create(replace(ONE, slice=slice))
    cloud.world.settle()
    cloud.world.advance(3599)
    assert state(provider) is SliceState.READY
    ready_at = provider.status(NAME, ZONE).ready_at
    assert ready_at is not None
    cloud.world.advance(7200)
    found = provider.status(NAME, ZONE)
    assert found.state is (SliceState.ABSENT if slice == "v6e-8" else SliceState.STOPPED)
    # A controller that was off in the meantime must learn that the slice was billed, and for how long.
    assert (found.ready_at, found.ended_at) == (ready_at, ready_at + 3600)
    assert cloud.world.bill()[NAME] == pytest.approx(HOURLY_USD[slice])
    assert provider.delete(NAME, ZONE) == ready_at + 3600
    assert cloud.names() == set()


def test_creation_that_is_not_complete(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    for request in (ONE, SECOND):
        cloud.control("delays", create=60.0)
        provider.create(request)
        assert state(provider, request.name) is SliceState.CREATING
        cloud.world.advance(61)
        cloud.world.settle()
        assert state(provider, request.name) is SliceState.READY


def test_a_creation_in_progress_is_deleted(provider: ComputeProvider) -> None:
    cloud = CloudInProcess(tick_seconds=10.0, delays={"create": 60.0, "delete": 30.0, "queue": 0.0})
    provider = ComputeProvider(cloud.rest)
    for request in (ONE, SECOND):
        provider.create(request)
        provider.delete(request.name, ZONE)
        cloud.world.advance(3600)
        assert cloud.names() == set()
    assert sum(cloud.world.bill().values()) == 0


def test_leftovers_of_an_interrupted_creation_are_listed_and_deleted(
    cloud: CloudInProcess, provider: ComputeProvider
) -> None:
    """Kill the process after each request of a creation, before it reads the answer."""
    request_of = cloud.request
    for number, last in enumerate(("resourcePolicies", "instanceTemplates", "instanceGroupManagers"), start=1):
        request = replace(FOUR, name=f"forerun-a-{number}", labels=labels.slice_labels("a", number), request_id=last)

        def killed(method: str, url: str, last: str = last, **more: Any) -> Any:
            found = request_of(method, url, **more)
            if method == "POST" and url.endswith(last):
                raise KeyboardInterrupt
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cloud, "request", killed)
            with pytest.raises(KeyboardInterrupt):
                provider.create(request)
        listed = {(one.kind, one.name) for one in provider.list()}
        assert {(kind, name) for kind, name in cloud.names() if kind not in ("instance", "disk")} == listed
        assert {name for _, name in listed} == {request.name}
        for resource in provider.list():
            provider.delete(resource.name, resource.zone)
        assert cloud.names() == set()


def test_a_lost_answer_creates_one_slice(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    for kind in ("lost", "duplicate"):
        for request in (ONE, SECOND):
            cloud.inject(
                Fault(kind, method="POST", path=f"/({'instances' if request is ONE else 'instanceGroupManagers'})$")
            )
            provider.create(request)
            cloud.world.settle()
            assert state(provider, request.name) is SliceState.READY
            cloud.inject(Fault(kind, method="DELETE"))
            provider.delete(request.name, ZONE)
            assert cloud.names() == set()
            cloud.server.compute.store.by_request.clear()  # an hour later, the API forgets request IDs


def test_the_list_has_labels_and_metadata(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    second = replace(SECOND, capacity="spot")
    provider.create(ONE)
    provider.create(second)
    cloud.world.settle()
    found = {(one.kind, one.name): one for one in provider.list()}
    assert set(found) == {("instance", NAME)} | {
        (kind, "forerun-a-2") for kind in ("instance group", "template", "policy")
    }
    one, group = found["instance", NAME], found["instance group", "forerun-a-2"]
    assert (one.slice, one.capacity, one.zone) == ("v6e-8", "on-demand", ZONE)
    assert (group.slice, group.capacity, group.zone) == ("v6e-16", "spot", ZONE)
    for resource, request in ((one, ONE), (group, second)):
        assert resource.labels == request.labels
        assert resource.metadata[labels.FOLDER] == "gs://b/a"
        assert resource.metadata[labels.MAX_USD] == "40"
        assert resource.status.state is SliceState.READY
        assert resource.costs_money
        assert resource.created_at == cloud.world.now()
    assert not found["template", "forerun-a-2"].costs_money


def test_resources_of_others_are_neither_listed_nor_deleted(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    """The run `a-1` has names that begin as those of the machines of the first attempt of `a`."""
    neighbour = replace(ONE, name="forerun-a-1-1", labels=labels.slice_labels("a-1", 1), request_id="n")
    for request in (FOUR, neighbour):
        provider.create(request)
    foreign = f"projects/{PROJECT}/zones/{ZONE}/disks"
    cloud.rest.call("POST", "compute", foreign, {"name": "forerun-of-somebody"})
    cloud.world.settle()
    assert [one.name for one in provider.list() if one.kind == "instance"] == ["forerun-a-1-1"]
    assert len(provider.addresses(NAME, ZONE)) == 4
    provider.delete(NAME, ZONE)
    assert cloud.names() == {("instance", "forerun-a-1-1"), ("disk", "forerun-a-1-1"), ("disk", "forerun-of-somebody")}


def test_a_disk_that_survived_its_machine_is_listed_and_deleted(
    cloud: CloudInProcess, provider: ComputeProvider
) -> None:
    disk = {"name": "forerun-a-1-01", "labels": dict(ONE.labels)}
    cloud.rest.call("POST", "compute", f"projects/{PROJECT}/zones/{ZONE}/disks", disk)
    (found,) = provider.list()
    assert (found.kind, found.name, found.costs_money) == ("disk", "forerun-a-1-01", True)
    provider.delete(NAME, ZONE)
    assert cloud.names() == set()


class TwoAddresses:
    """Machines with known addresses and host keys."""

    def __init__(self) -> None:
        self.keys = 0

    def start(self, *_: Any) -> None: ...

    def stop(self, *_: Any, **__: Any) -> None: ...

    def notice(self, *_: Any) -> None: ...

    def addresses(self, slice_name: str) -> list[tuple[str, str]]:
        return [(f"34.0.0.{index}", f"10.0.0.{index}") for index in range(4)]

    def host_keys(self, slice_name: str) -> list[list[str]]:
        return [[f"ecdsa-sha2-nistp256 B{index}", f"ssh-ed25519 A{index}"] for index in range(self.keys)]


@pytest.fixture
def connected(cloud: CloudInProcess) -> Iterator[TwoAddresses]:
    machines = TwoAddresses()
    TwoAddresses.__name__ = "NoMachines"  # the fake starts these without a thread
    cloud.world.machines = machines
    yield machines
    TwoAddresses.__name__ = "TwoAddresses"


def test_addresses_and_host_keys(cloud: CloudInProcess, provider: ComputeProvider, connected: TwoAddresses) -> None:
    provider.create(FOUR)
    cloud.world.settle()
    found = provider.addresses(NAME, ZONE)
    assert [(one.index, one.address, one.internal) for one in found] == [
        (index, f"34.0.0.{index}", f"10.0.0.{index}") for index in range(4)
    ]
    assert provider.host_keys(NAME, ZONE) == []
    connected.keys = 3
    assert provider.host_keys(NAME, ZONE) == []
    connected.keys = 4
    assert [keys[0] for keys in provider.host_keys(NAME, ZONE)] == [f"ssh-ed25519 A{index}" for index in range(4)]


def test_internal_addresses(cloud: CloudInProcess, provider: ComputeProvider, connected: TwoAddresses) -> None:
    provider.create(replace(ONE, internal_only=True))
    cloud.world.settle()
    (found,) = provider.addresses(NAME, ZONE)
    assert (found.address, found.internal) == ("10.0.0.0", "10.0.0.0")


def test_a_gpu_machine(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    provider.create(replace(ONE, slice="a3-highgpu-8g"))
    cloud.world.settle()
    (found,) = provider.list()
    assert (found.slice, found.status.state) == ("a3-highgpu-8g", SliceState.READY)


def test_a_missing_permission_is_an_error_for_the_user(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    cloud.inject(Fault("error", http=403, message="Required 'compute.instances.list' permission", count=9))
    with pytest.raises(UserError) as caught:
        provider.list()
    assert caught.value.code == "E-CLOUD-016"
