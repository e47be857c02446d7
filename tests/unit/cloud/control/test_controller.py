"""The controller against a simulated cloud: complete runs, kills at every call, limits and leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_cloud import (
    Killed,
    RecordedDisplay,
    SimulatedCloud,
    SimulatedDelivery,
    cloud_run,
    controller,
    option,
)

from forerun.cloud.control.actions import EndRun
from forerun.cloud.control.controller import Controller
from forerun.cloud.provider import CloudUnavailable, Failure, HostAddress, SliceState
from forerun.cloud.record.entries import AttemptEntry, CloudRun, LeaseEntry, StopEntry

PRICES = {"v6e-8": 10.0, "v5e-16": 30.0}
CENT = 0.01


def started(cloud: SimulatedCloud, *options: object, max_usd: float | None = 40.0) -> SimulatedCloud:
    cloud.files().create_run(cloud_run(*options, max_usd=max_usd))  # type: ignore[arg-type]
    return cloud


def usd(cloud: SimulatedCloud) -> float:
    files = cloud.files()
    return sum(end.usd for number in files.attempts() if (end := files.end(number)) is not None)


def reasons(cloud: SimulatedCloud) -> list[str]:
    files = cloud.files()
    return [end.reason for number in files.attempts() if (end := files.end(number)) is not None]


def follow(cloud: SimulatedCloud, since: float = 0.0) -> str:
    return ended(controller(cloud, since=since), cloud)


def ended(one: Controller, cloud: SimulatedCloud) -> str:
    _, end = one.follow(cloud.advance)
    assert end is not None
    return end.reason


def test_a_run_trains_to_its_end_and_leaves_nothing() -> None:
    cloud = started(SimulatedCloud(PRICES))
    assert follow(cloud) == "finished"
    assert cloud.slices == {}
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=CENT)
    assert cloud.bill() > 600 * 10 / 3600
    (created,) = cloud.created
    assert created == ("forerun-sim-1", "us-east1-d")


def test_hosts_get_the_start_of_billing() -> None:
    cloud = started(SimulatedCloud(PRICES))
    one = controller(cloud)
    one.delivery = delivery = SimulatedDelivery(cloud)
    assert ended(one, cloud) == "finished"
    assert delivery.ready_at is not None
    assert delivery.ready_at == cloud.past[0].ready_at


def test_the_request_identifies_the_run() -> None:
    cloud = started(SimulatedCloud(PRICES))
    follow(cloud)
    request = cloud.past[0].request
    assert request.labels == {"forerun-run": "sim", "forerun-attempt": "1", "forerun-role": "slice"}
    assert request.metadata["forerun-folder"] == "gs://bucket"
    assert (request.metadata["forerun-usd-per-hour"], request.metadata["forerun-max-usd"]) == ("10", "40")
    assert request.limit_seconds == 14400


def test_preempted_runs_resume_in_the_next_zone_when_the_first_has_no_capacity() -> None:
    cloud = started(SimulatedCloud(PRICES), option("zone-a"), option("zone-b"))
    one = controller(cloud)
    cloud.train(100, one)
    cloud.preempt()
    cloud.refuse["zone-a"] = Failure.CAPACITY
    assert ended(one, cloud) == "finished"
    assert reasons(cloud) == ["preempted", "refused", "finished"]
    assert [zone for _, zone in cloud.created] == ["zone-a", "zone-b"]
    assert cloud.slices == {}
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=CENT)


def test_the_controller_alone_keeps_the_cap() -> None:
    """Neither the hosts nor the API enforce a limit here. The run would need 10 hours."""
    cloud = started(SimulatedCloud(PRICES, work_seconds=36000), max_usd=5.0)
    assert follow(cloud) == "budget"
    assert cloud.slices == {}
    assert 4.0 < cloud.bill() <= 5.0
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=CENT)
    assert cloud.trained_seconds > 1200  # 1800 s less two graces, and the queue is not billed


def test_preemptions_do_not_raise_the_cap() -> None:
    cloud = started(SimulatedCloud(PRICES, work_seconds=36000), max_usd=5.0)
    one = controller(cloud)
    for _ in range(400):
        _, action = one.step()
        if isinstance(action, EndRun):
            break
        cloud.advance(5)
        if cloud.now % 400 == 0:
            cloud.preempt()
    assert reasons(cloud).count("preempted") >= 2
    assert ended(one, cloud) == "budget"
    assert cloud.bill() <= 5.0
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=CENT)


def test_a_stop_of_another_laptop_saves_and_deletes() -> None:
    cloud = started(SimulatedCloud(PRICES))
    one = controller(cloud)
    cloud.train(100, one)
    cloud.files().request_stop(StopEntry(cloud.now, "user"))
    assert ended(one, cloud) == "stopped"
    assert cloud.slices == {}
    assert reasons(cloud) == ["stopped"]
    cloud.files().withdraw_stop()  # as `forerun run` does when it resumes
    assert follow(cloud, since=cloud.now) == "finished"
    assert reasons(cloud) == ["stopped", "finished"]


def test_silent_hosts_are_replaced() -> None:
    cloud = started(SimulatedCloud(PRICES))
    one = controller(cloud)
    cloud.train(100, one)
    next(iter(cloud.slices.values())).silent = True
    assert ended(one, cloud) == "finished"
    assert reasons(cloud) == ["preempted", "finished"]
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=CENT)


def test_only_the_holder_of_the_lease_acts() -> None:
    cloud = started(SimulatedCloud(PRICES))
    cloud.files().write_lease(LeaseEntry("keeper", cloud.now + 60))
    one = controller(cloud)
    for _ in range(5):
        one.step()
        cloud.advance(5)
    assert cloud.created == []
    assert isinstance(one.display, RecordedDisplay)
    assert one.display.standbys == 5
    assert ended(one, cloud) == "finished"  # the keeper's lease ends
    lease = cloud.files().lease()
    assert lease is not None
    assert lease.until <= cloud.now


def test_the_slice_of_an_ended_attempt_is_deleted() -> None:
    """A controller was suspended before its request, for longer than its lease."""
    cloud = started(SimulatedCloud(PRICES))
    suspended, other = controller(cloud, "suspended"), controller(cloud, "other")
    cloud.before = _killed_at(cloud, "create", suspended)
    with pytest.raises(Killed):
        suspended.follow(cloud.advance)
    cloud.before = lambda: None
    cloud.refuse["us-east1-d"] = Failure.QUOTA
    cloud.advance(60)
    assert ended(other, cloud) == "failed"
    cloud.refuse.clear()
    assert reasons(cloud) == ["refused"]
    entry = cloud.files().attempts()[1]
    assert isinstance(entry, AttemptEntry)
    suspended._request(suspended.observer.view(cloud.now), entry)
    assert cloud.slices == {}


def _killed_at(cloud: SimulatedCloud, call: str, one: object) -> object:
    import inspect

    def before() -> None:
        if any(frame.function == call for frame in inspect.stack()[:3]):
            raise Killed

    return before


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_kill_or_failure_leaks_a_slice_or_exceeds_the_cap(data: st.DataObject) -> None:
    """Kill controllers, fail calls and preempt slices at random. A call may fail before or after its effect."""
    cloud = SimulatedCloud(
        PRICES,
        queue_seconds=data.draw(st.sampled_from([0.0, 20.0, 300.0])),
        work_seconds=data.draw(st.sampled_from([60.0, 600.0, 36000.0])),
        tells_times=data.draw(st.booleans()),
        agent_deletes=data.draw(st.booleans()),
    )
    max_usd = data.draw(st.sampled_from([1.0, 3.0]))
    started(cloud, option("zone-a"), option("zone-b", "v5e-16", 30.0, 4), max_usd=max_usd)
    faults = data.draw(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["kill", "fail"])), max_size=12))
    events = data.draw(st.lists(st.sampled_from(["", "", "", "preempt", "refuse", "allow"]), max_size=60))
    calls = [0]
    plan = iter(faults)
    next_fault = [next(plan, None)]

    def before() -> None:
        calls[0] += 1
        fault = next_fault[0]
        if fault is not None and calls[0] >= fault[0]:
            calls[0], next_fault[0] = 0, next(plan, None)
            raise Killed if fault[1] == "kill" else CloudUnavailable("503")

    cloud.before = before
    happening = iter(events)

    def passing(seconds: float) -> None:
        cloud.advance(seconds)
        event = next(happening, "")
        if event == "preempt":
            cloud.preempt()
        if event == "refuse":
            cloud.refuse["zone-a"] = Failure.CAPACITY
        if event == "allow":
            cloud.refuse.clear()

    end = None
    for process in range(len(faults) + 1):
        one = controller(cloud, f"process-{process}")
        try:
            _, end = one.follow(passing)
            break
        except Killed:
            cloud.advance(data.draw(st.sampled_from([0.0, 70.0])))
            assert all(key in _claimed(cloud) for key in cloud.slices)  # every slice has a record
    assert end is not None
    assert end.reason in ("finished", "budget")
    assert cloud.slices == {}
    assert (cloud.files().finished() is not None) == (end.reason == "finished")
    minute = 30.0 / 60
    assert cloud.bill() <= max_usd + minute
    slack = CENT if cloud.tells_times else 60 * len(cloud.past) * 30 / 3600
    assert usd(cloud) == pytest.approx(cloud.bill(), abs=slack)
    assert all(one.state is not SliceState.READY or one.ended_at is not None for one in cloud.past)


def _claimed(cloud: SimulatedCloud) -> set[tuple[str, str]]:
    return {(entry.resource, entry.option.zone) for entry in cloud.files().attempts().values()}


class FailedSetup(SimulatedDelivery):
    """On the first slice, the startup script fails before it starts the agents."""

    def deliver(self, run: CloudRun, attempt: AttemptEntry, *hosts: Any) -> None:
        if attempt.number > 1:
            super().deliver(run, attempt, *hosts)

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        assert len(hosts) == len(host_keys) > 0
        return "host 0: no package source"


def test_a_setup_that_fails_before_the_agents_start_ends_its_slice_at_once() -> None:
    cloud = started(SimulatedCloud(PRICES))
    one = controller(cloud)
    one.delivery = FailedSetup(cloud)
    assert ended(one, cloud) == "finished"
    assert reasons(cloud) == ["broken", "finished"]
    first, ready = cloud.files().end(1), cloud.files().ready(1)
    assert first is not None
    assert ready is not None
    assert first.at - ready.at < 60
    assert first.detail == "host 0: no package source"
