"""The controller against a record that is damaged, deleted or forged while it runs.

The bill of the simulated cloud is the oracle: it is computed without the record. Neither the hosts nor the API
enforce a limit here, and the job needs far more time than the cap allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from simulated_cloud import START, SimulatedCloud, SimulatedProvider, cloud_run, controller, option

from forerun.cloud.control.actions import EndRun
from forerun.cloud.control.controller import Controller
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.provider import SliceState, SliceStatus

Change = Callable[[SimulatedCloud], None]
PRICES = {"v6e-8": 10.0, "v6e-64": 80.0}
CAP_USD = 5.0
ONE_POLL_USD = 10.0 * 5 / 3600


class LimitReached(Exception):
    """The simulated time of a test is over."""


def write(name: str, content: bytes | object) -> Change:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda cloud: cloud.contents.update({f"cloud/{name}": body})


def edit(name: str, **values: object) -> Change:
    def change(cloud: SimulatedCloud) -> None:
        entry = json.loads(cloud.contents[f"cloud/{name}"])
        cloud.contents[f"cloud/{name}"] = json.dumps(entry | values).encode()

    return change


def remove(name: str) -> Change:
    return lambda cloud: cloud.contents.pop(f"cloud/{name}", None) and None


def wipe(cloud: SimulatedCloud) -> None:
    cloud.contents.clear()


def follow(
    cloud: SimulatedCloud,
    change: Change,
    at: float,
    *,
    every_poll: bool = False,
    seconds: float = 9000,
    controls: Controller | None = None,
) -> str:
    """Follow a run, change its record after `at` seconds, and return why the run ended, or "" if it has not."""
    one = controller(cloud) if controls is None else controls
    changed = False

    def sleep(pause: float) -> None:
        nonlocal changed
        cloud.advance(pause)
        if cloud.now - START > at and (every_poll or not changed):
            changed = True
            change(cloud)
        if cloud.now - START > seconds:
            raise LimitReached

    try:
        _, end = one.follow(sleep)
    except LimitReached:
        return ""
    assert isinstance(end, EndRun)
    return end.reason


def new_cloud(*, work_seconds: float = 1e9) -> SimulatedCloud:
    cloud = SimulatedCloud(PRICES, work_seconds=work_seconds)
    cloud.files().create_run(cloud_run(max_usd=CAP_USD))
    return cloud


HOST = {"attempt": 1, "host": 0, "at": START + 200, "phase": "training"}
END = {"at": START + 100, "reason": "preempted", "usd": 0.0}
EXPENSIVE = {
    "provider": "tpu",
    "slice": "v6e-64",
    "zone": "us-east1-d",
    "capacity": "spot",
    "hosts": 16,
    "usd_per_hour": 0.01,
}
FORGED_ATTEMPT = {
    "number": 1,
    "option": EXPENSIVE,
    "resource": "forerun-other-1",
    "created_at": START,
    "limit_seconds": None,
    "spent_usd": 0.0,
}
CHANGES: dict[str, tuple[Change, float]] = {
    "nothing": (lambda cloud: None, 200),
    "all files deleted": (wipe, 200),
    "all files deleted while the slice is requested": (wipe, 10),
    "run.json deleted": (remove("run.json"), 200),
    "run.json garbage": (write("run.json", b"\0\1garbage"), 200),
    "run.json not UTF-8": (write("run.json", b'{"name": "\xff\xfe"}'), 200),
    "max_usd NaN": (edit("run.json", max_usd=float("nan")), 200),
    "max_usd null": (edit("run.json", max_usd=None), 10),
    "max_usd 1e6": (edit("run.json", max_usd=1e6), 10),
    "options empty": (edit("run.json", options=[]), 200),
    "options expensive": (edit("run.json", options=[EXPENSIVE]), 200),
    "attempt deleted": (remove("attempts/001.json"), 200),
    "attempt garbage": (write("attempts/001.json", b"x"), 200),
    "attempt without a limit, in another resource": (write("attempts/001.json", FORGED_ATTEMPT), 200),
    "next attempt garbage": (write("attempts/002.json", b"x"), 200),
    "next attempt a list": (write("attempts/002.json", b"[]"), 200),
    "ready garbage": (write("attempts/001-ready.json", b"x"), 10),
    "ready null": (write("attempts/001-ready.json", {"at": None}), 10),
    "ready in the future": (write("attempts/001-ready.json", {"at": START + 1e6}), 10),
    "ready 1e12": (write("attempts/001-ready.json", {"at": 1e12}), 10),
    "ready NaN": (write("attempts/001-ready.json", b'{"at": NaN}'), 10),
    "ready deleted": (remove("attempts/001-ready.json"), 200),
    "end of a slice that lives": (write("attempts/001-end.json", END), 200),
    "end with a negative cost": (write("attempts/001-end.json", END | {"usd": -1e6}), 200),
    "end with the cost NaN": (write("attempts/001-end.json", b'{"at": 1, "reason": "preempted", "usd": NaN}'), 200),
    "end with a text as its cost": (write("attempts/001-end.json", END | {"usd": "0"}), 200),
    "host time text": (write("hosts/001-00.json", HOST | {"at": "x"}), 200),
    "host phase list": (write("hosts/001-00.json", HOST | {"phase": ["x"]}), 200),
    "host report list": (write("hosts/001-00.json", []), 200),
    "host save_seconds NaN": (write("hosts/001-00.json", HOST | {"save_seconds": float("nan")}), 200),
    "host save_seconds text": (write("hosts/001-00.json", HOST | {"save_seconds": "x"}), 200),
    "lease text": (write("controller.json", {"holder": "x", "until": "zzz"}), 200),
    "lease 1e12": (write("controller.json", {"holder": "x", "until": 1e12}), 200),
    "lease of a day": (write("controller.json", {"holder": "x", "until": START + 86400}), 10),
    "lease garbage": (write("controller.json", b"x"), 200),
    "stop garbage": (write("stop.json", b"x"), 200),
    "stop time text": (write("stop.json", {"at": "x", "reason": "y"}), 200),
    "stop in the future": (write("stop.json", {"at": START + 1e6, "reason": "y"}), 200),
    "finished garbage": (write("finished.json", b"x"), 200),
    "finished": (write("finished.json", {"at": 1, "attempt": 1, "files": {}}), 200),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_of_the_record_prolongs_a_run(name: str) -> None:
    change, at = CHANGES[name]
    cloud = new_cloud()
    reason = follow(cloud, change, at)
    assert reason != ""
    assert cloud.slices == {}
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD


EVERY_POLL = {
    "all files deleted": wipe,
    "ready in the future": write("attempts/001-ready.json", {"at": START + 1e6}),
    "lease renewed": lambda cloud: write("controller.json", {"holder": "x", "until": cloud.now + 60})(cloud),
    "end of each attempt": lambda cloud: [
        write(f"attempts/{number:03}-end.json", END | {"at": cloud.now})(cloud) for number in range(1, 200)
    ],
    "reports of the first hour only": lambda cloud: [
        write(f"hosts/{number:03}-{host:02}.json", HOST | {"attempt": number, "host": host, "at": START})(cloud)
        for number in range(1, 9)
        for host in range(2)
    ],
}


@pytest.mark.parametrize("name", EVERY_POLL)
@pytest.mark.parametrize("preemptions", [False, True])
def test_a_record_that_is_forged_again_and_again_prolongs_nothing(name: str, preemptions: bool) -> None:
    cloud = new_cloud()

    def change(changed: SimulatedCloud) -> None:
        EVERY_POLL[name](changed)
        if preemptions and int(changed.now) % 600 < 5:
            changed.preempt()

    follow(cloud, change, 0, every_poll=True)
    assert cloud.slices == {}
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD * (1 + len(cloud.past))


def test_a_lower_cap_in_the_record_shortens_a_run() -> None:
    cloud = new_cloud()
    assert follow(cloud, edit("run.json", max_usd=3.0), 200) == "budget"
    assert cloud.bill() <= 3.0 + ONE_POLL_USD


def test_a_forged_end_deletes_the_slice_at_the_next_look_and_counts_its_cost() -> None:
    cloud = new_cloud()
    one = controller(cloud)
    while cloud.bill() < 0.5:
        one.step()
        cloud.advance(5)
    write("attempts/001-end.json", END)(cloud)
    one.step()
    assert cloud.slices == {}
    view, _ = one.step()
    assert view.spent_usd == pytest.approx(cloud.bill(), abs=0.001)


def test_a_forged_end_of_a_slice_that_was_never_seen_ready_has_the_cost_that_the_api_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slice becomes ready and deletes itself while no controller runs."""
    cloud, ledger = new_cloud(), RunLedger()
    first = controller(cloud, ledger=ledger)
    while not cloud.slices:
        first.step()
    cloud.advance(620)
    (rented,) = cloud.slices.values()
    cloud.end(rented)
    write("attempts/001-end.json", END)(cloud)
    times = SliceStatus(SliceState.ABSENT, ready_at=rented.ready_at, ended_at=rented.ended_at)
    monkeypatch.setattr(SimulatedProvider, "status", lambda provider, name, zone: times)
    view, _ = controller(cloud, ledger=ledger).step()
    assert cloud.bill() > 1.0
    assert view.spent_usd == pytest.approx(cloud.bill(), abs=0.001)


def test_a_forged_attempt_rents_nothing_that_the_user_did_not_choose() -> None:
    cloud = new_cloud()
    write("attempts/001.json", FORGED_ATTEMPT)(cloud)
    assert follow(cloud, lambda cloud: None, 0) == "budget"
    assert {one.request.slice for one in cloud.past} == {"v6e-8"}
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD


def test_a_forged_next_attempt_counts_the_complete_cost_of_the_running_one() -> None:
    """The forged entry is adopted while the first attempt has cost little. Its limit must not stay at that time's."""
    cloud = new_cloud()
    one = controller(cloud)
    while cloud.bill() < 0.1:
        one.step()
        cloud.advance(5)
    entry = json.loads(cloud.contents["cloud/attempts/001.json"])
    write("attempts/002.json", entry | {"number": 2, "resource": "forerun-job-2", "spent_usd": 0.0})(cloud)
    while cloud.bill() < 3.0:
        one.step()
        cloud.advance(5)
    (first,) = cloud.slices.values()
    first.state, first.ended_at, first.preempted = SliceState.PREEMPTED, cloud.now, True
    assert follow(cloud, lambda cloud: None, 0, controls=one) == "budget"
    assert len(cloud.past) == 2
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD


def test_a_controller_that_starts_with_a_wrong_clock_counts_the_time_that_the_api_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud, ledger = new_cloud(), RunLedger()
    first = controller(cloud, ledger=ledger)
    while cloud.bill() < 1.0:
        first.step()
        cloud.advance(5)
    cloud.advance(300)
    (rented,) = cloud.slices.values()
    cloud.end(rented)
    times = SliceStatus(SliceState.ABSENT, ready_at=rented.ready_at, ended_at=rented.ended_at)
    monkeypatch.setattr(SimulatedProvider, "status", lambda provider, name, zone: times)
    cloud.clock_error = -7200.0
    second = controller(cloud, ledger=ledger)
    second.step()
    view, _ = second.step()
    assert view.spent_usd == pytest.approx(cloud.bill(), abs=0.01)


def test_a_forged_zone_does_not_redirect_the_deletion() -> None:
    cloud = SimulatedCloud(PRICES, work_seconds=1e9)
    cloud.files().create_run(cloud_run(option("zone-a"), option("zone-b"), max_usd=CAP_USD))
    first = controller(cloud)
    while not cloud.slices:
        first.step()
        cloud.advance(5)
    entry = json.loads(cloud.contents["cloud/attempts/001.json"])
    edit("attempts/001.json", option=entry["option"] | {"zone": "zone-b"})(cloud)
    follow(cloud, lambda cloud: None, 0)  # another process, which knows only the record
    assert cloud.slices == {}
    assert {zone for _, zone in cloud.created} == {"zone-a", "zone-b"}


def test_a_slice_that_its_hosts_delete_in_its_first_minute_is_not_free() -> None:
    """Only a preemption is. A forged limit of zero lets the agents delete each new slice."""
    cloud = new_cloud()
    one = controller(cloud)
    while not any(rented.ready_at for rented in cloud.slices.values()) or cloud.bill() < 0.1:
        one.step()
        cloud.advance(5)
    (rented,) = cloud.slices.values()
    cloud.end(rented)
    view, _ = one.step()
    view, _ = one.step()
    assert 0.1 <= cloud.bill() < 60 * 10.0 / 3600
    assert view.spent_usd == pytest.approx(cloud.bill(), abs=ONE_POLL_USD)


def test_a_controller_that_knows_no_attempt_deletes_a_running_slice_before_it_starts_one() -> None:
    """The record is deleted while the second attempt runs, and a keeper that has seen no attempt takes over."""
    cloud = new_cloud()
    keeper, first = controller(cloud), controller(cloud)
    for preempted_usd in (0.5, 0.0):
        while not cloud.slices or cloud.bill() < preempted_usd:
            first.step()
            cloud.advance(5)
        (rented,) = cloud.slices.values()
        if preempted_usd:
            rented.state, rented.ended_at, rented.preempted = SliceState.PREEMPTED, cloud.now, True
            while rented in cloud.slices.values():
                first.step()
                cloud.advance(5)
    wipe(cloud)
    keeper._swept_at = cloud.now  # it has looked for such slices before the attempt began
    for _ in range(10):
        keeper.step()
        assert len(cloud.slices) <= 1
        cloud.advance(1)
    assert rented in cloud.past
