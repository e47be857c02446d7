"""The controller with the real provider of the Cloud TPU API against the fake cloud: budget, preemption and billing.

The hosts are simulated by reports in the record. Neither an agent nor the API enforces a limit here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import pytest
from fake.process import PROJECT, FakeCloud
from simulated_cloud import MemoryFolder, RecordedDisplay

from forerun.cloud.control.controller import Controller
from forerun.cloud.control.offers import slice_offers
from forerun.cloud.provider import HostAddress, Provider
from forerun.cloud.providers import provider_named
from forerun.cloud.record.entries import STOPPED, TRAINING, AttemptEntry, CloudRun, FinishEntry, HostEntry
from forerun.cloud.record.run_files import RunFiles

CENT = 0.01
ZONES = ("us-central1-a", "europe-west4-b")


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(create_seconds=30.0) as found:
        yield found


class World:
    """A run with hosts that report while the fake's clock runs."""

    def __init__(self, cloud: FakeCloud, *, max_usd: float, work_seconds: float) -> None:
        self.cloud, self.work_seconds, self.trained_seconds = cloud, work_seconds, 0.0
        self.files = RunFiles(MemoryFolder({}))
        self.provider: Provider = provider_named("tpu", PROJECT, os.environ | cloud.environment())
        options = tuple(slice_offers("v5e-16", "spot", ZONES))
        self.run = CloudRun("sim", "gs://bucket", "name: sim\n", options, max_usd, cloud.now())
        self.files.create_run(self.run)
        self.attempt: AttemptEntry | None = None
        self.preempt_after = float("inf")

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {"startup-script": "#!/bin/bash\n"}

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        assert len(hosts) == 4
        self.attempt = attempt

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""

    def follow(self) -> str:
        controller = Controller(self.run, self.files, {"tpu": self.provider}, self, RecordedDisplay(), "laptop")
        _, end = controller.follow(self.sleep, poll_seconds=20.0)
        assert end is not None
        return end.reason

    def sleep(self, seconds: float) -> None:
        self.cloud.advance(seconds)
        names = [one["name"] for one in self.cloud.resources() if one["kind"] == "node"]
        if self.attempt is None or self.attempt.resource not in names:
            return
        if self.trained_seconds >= self.preempt_after:
            self.preempt_after = float("inf")
            self.cloud.preempt(self.attempt.resource)
            return
        stopping = self.files.stop() is not None
        self.trained_seconds += 0 if stopping else seconds
        now = self.cloud.now()
        for host in range(4):
            phase, code = (STOPPED, 75) if stopping else (TRAINING, None)
            self.files.report_host(HostEntry(self.attempt.number, host, now, phase, exit_code=code, save_seconds=10.0))
        if self.trained_seconds >= self.work_seconds:
            self.files.create_finished(FinishEntry(now, self.attempt.number, {}))

    @property
    def usd(self) -> float:
        ends = [self.files.end(number) for number in self.files.attempts()]
        return sum(end.usd for end in ends if end is not None)


def test_the_controller_alone_stops_at_the_cap(cloud: FakeCloud) -> None:
    world = World(cloud, max_usd=3.0, work_seconds=1e9)
    assert world.follow() == "budget"
    assert cloud.resources() == []
    bill = sum(cloud.bill().values())
    assert 2.0 < bill <= 3.0
    assert world.usd == pytest.approx(bill, abs=CENT)
    stop = world.files.stop()
    assert stop is not None
    assert stop.reason == "budget"


def test_a_preempted_run_continues_in_another_zone_and_its_figure_equals_the_bill(cloud: FakeCloud) -> None:
    world = World(cloud, max_usd=50.0, work_seconds=900.0)
    world.preempt_after = 300.0
    first = ZONES[0]
    cloud.set_capacity(first, "v5e-16", 1)
    original = cloud.preempt

    def preempt(name: str, notice_seconds: float = 0.0) -> None:
        original(name, notice_seconds)
        cloud.set_capacity(first, "v5e-16", 0)

    cloud.preempt = preempt  # type: ignore[method-assign]
    assert world.follow() == "finished"
    assert cloud.resources() == []
    attempts = world.files.attempts()
    assert [entry.option.zone for entry in attempts.values()] == [first, first, ZONES[1]]
    ends = [world.files.end(number) for number in attempts]
    assert [end.reason for end in ends if end is not None] == ["preempted", "refused", "finished"]
    assert world.usd == pytest.approx(sum(cloud.bill().values()), abs=CENT)
