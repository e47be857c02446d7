"""The keeper's machine, on the fake cloud. Some of its zones have no e2 machines, as TPU-only zones of the real one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cloud_in_process import CloudInProcess

from forerun.cloud import labels
from forerun.cloud.compute.compute_provider import ComputeProvider
from forerun.cloud.keeper.keeper_start import keeper_place, keeper_request
from forerun.cloud.provider import SliceRequest, SliceState
from forerun.cloud.record.entries import CloudRun, Option
from forerun.errors import UserError

SLICE = SliceRequest(
    name="forerun-a-1",
    slice="v6e-8",
    zone="us-east5-a",
    capacity="on-demand",
    labels=labels.slice_labels("a", 1),
    metadata={labels.FOLDER: "gs://b/a"},
    request_id="1",
)


@pytest.fixture
def cloud() -> CloudInProcess:
    return CloudInProcess()


@pytest.fixture
def provider(cloud: CloudInProcess) -> ComputeProvider:
    return ComputeProvider(cloud.rest)


def test_the_zone_of_the_slice_is_preferred(provider: ComputeProvider) -> None:
    assert keeper_place(provider, "us-east5-b") == ("us-east5-b", "e2-small")


def test_a_zone_without_small_machines_is_replaced_by_another_of_its_region(provider: ComputeProvider) -> None:
    zone, machine = keeper_place(provider, "us-south1-c")
    assert (zone, machine) == ("us-south1-a", "e2-small")


def test_a_region_without_e2_machines_has_other_ones(provider: ComputeProvider) -> None:
    assert keeper_place(provider, "us-central2-b") == ("us-central2-b", "n2-standard-2")


def test_a_region_without_any_machine(
    cloud: CloudInProcess, provider: ComputeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud.server.compute, "_catalog", lambda *_: cloud.server.compute.store.get("absent"))
    with pytest.raises(UserError) as caught:
        keeper_place(provider, "us-central2-b")
    assert caught.value.code == "E-CLOUD-023"


def test_a_keeper_lives_apart_from_the_slice(cloud: CloudInProcess, provider: ComputeProvider) -> None:
    place = keeper_place(provider, SLICE.zone)
    option = Option("tpu", "v6e-8", SLICE.zone, "on-demand", 1, 10.8)
    run = CloudRun("a", "gs://b/a", "steps: 1\n", (option,), 40.0, 0.0, keeper=True)
    keeper = keeper_request(run, *place, {"startup-script": "x"}, 3600)
    provider.create(SLICE)
    provider.create(keeper)
    provider.create(replace(keeper))
    cloud.world.settle()
    found = {one.name: one for one in provider.list()}
    assert set(found) == {"forerun-a-1", "forerun-a-keeper"}
    assert found["forerun-a-keeper"].labels[labels.ROLE] == labels.KEEPER_ROLE
    assert found["forerun-a-keeper"].metadata[labels.FOLDER] == "gs://b/a"
    provider.delete("forerun-a-1", SLICE.zone)
    assert [one.name for one in provider.list()] == ["forerun-a-keeper"]
    assert provider.status("forerun-a-keeper", place[0]).state is SliceState.READY
    cloud.world.advance(3601)
    assert provider.list() == []  # the API deletes a keeper that nobody controls
    assert cloud.names() == set()
