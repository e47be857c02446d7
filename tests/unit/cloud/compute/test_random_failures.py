"""Random failures of the API and of the processes that use it. The oracle is what exists in the fake afterwards."""

import random
from dataclasses import replace
from typing import Any

import pytest
from cloud_in_process import CloudInProcess
from fake.faults import Fault

from forerun.cloud import labels
from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.provider import CloudUnavailable, RequestRefused, SliceRequest, SliceState

ZONE = "us-east5-a"
FOLDER = "gs://b/a"


class Killed(BaseException):
    """The process that sent a request is killed, before or after the API acts."""


class MortalCloud(CloudInProcess):
    """A cloud whose callers are killed at random."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(
            tick_seconds=7.0,
            delays={"create": chance.choice([0.0, 20.0]), "delete": chance.choice([0.0, 15.0]), "queue": 0.0},
        )
        self.chance, self.mortality = chance, 0.0

    def request(self, method: str, url: str, **more: Any) -> Any:
        if self.chance.random() < self.mortality:
            raise Killed
        found = super().request(method, url, **more)
        if self.chance.random() < self.mortality:
            raise Killed
        return found


def request(attempt: int, slice: str, capacity: Any) -> SliceRequest:
    return SliceRequest(
        name=labels.resource_name("a", attempt),
        slice=slice,
        zone=ZONE,
        capacity=capacity,
        labels=labels.slice_labels("a", attempt),
        metadata={labels.FOLDER: FOLDER},
        request_id=labels.request_id(FOLDER, attempt, "create"),
        limit_seconds=3600,
    )


def fault(chance: random.Random) -> Fault:
    kind = chance.choice(["error", "refuse", "lost", "duplicate"])
    method = chance.choice(["", "GET", "POST", "DELETE"])
    return Fault(kind, method=method, count=chance.choice([1, 3, 10]), http=chance.choice([429, 500, 503]))


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_left_and_nothing_exists_twice(seed: int) -> None:
    chance = random.Random(seed)
    cloud = MortalCloud(chance)
    requests = [
        request(number, chance.choice(["v6e-8", "v6e-16"]), chance.choice(["on-demand", "spot"])) for number in (1, 2)
    ]
    cloud.mortality = 0.03
    for _ in range(12):
        provider = ComputeProvider(cloud.rest)  # a new process has no memory of the last one
        if chance.random() < 0.5:
            cloud.inject(fault(chance))
        one = chance.choice(requests)
        try:
            action = chance.choice(["create", "create", "status", "delete", "list", "preempt", "wait"])
            if action == "create":
                provider.create(one)
            elif action == "status":
                provider.status(one.name, ZONE)
            elif action == "delete":
                provider.delete(one.name, ZONE)
            elif action == "list":
                provider.list()
            elif action == "preempt":
                cloud.control("preempt", name=one.name, notice_seconds=0)
            else:
                cloud.world.advance(chance.choice([1.0, 60.0, 4000.0]))
        except (Killed, CloudUnavailable, RequestRefused):
            pass
        running = [rental.name for rental in cloud.world.rentals if rental.ended_at is None]
        assert len(running) == len(set(running))
    cloud.mortality = 0.0
    cloud.control("clear_faults")
    provider = ComputeProvider(cloud.rest)
    listed = {one.name for one in provider.list()}
    assert {name for kind, name in cloud.names() if kind not in ("instance", "disk")} <= listed
    for one in requests:
        provider.delete(one.name, ZONE)
        assert provider.status(one.name, ZONE).state in (SliceState.ABSENT, SliceState.FAILED)
    cloud.world.advance(10 * 3600)
    assert cloud.names() == set()
    assert provider.list() == []


def test_a_list_without_one_zone_is_not_a_complete_list() -> None:
    """An aggregated list may omit zones. What they contain is unknown, not absent."""
    from forerun.cloud.provider import ZonesUnreachable

    cloud = CloudInProcess()
    provider = ComputeProvider(cloud.rest)
    provider.create(request(1, "v6e-8", "on-demand"))
    provider.create(replace(request(2, "v6e-8", "on-demand"), zone="us-east1-d"))
    cloud.world.settle()
    answer = cloud.server.compute._aggregated

    def partial(project: str, kind: str, query: dict[str, str]) -> Any:
        found = answer(project, kind, query)
        found["items"]["zones/us-east1-d"] = {"warning": {"code": "UNREACHABLE"}}
        return found

    cloud.server.compute._aggregated = partial  # type: ignore[method-assign]
    with pytest.raises(ZonesUnreachable) as caught:
        provider.list()
    assert caught.value.zones == ("us-east1-d",)
    assert [one.name for one in caught.value.resources] == ["forerun-a-1"]
