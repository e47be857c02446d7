"""The controller while calls are refused, the clock is wrong, or it is started again.

The bill of the simulated cloud is the oracle. Neither the hosts nor the API enforce a limit here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_cloud import START, RecordedDisplay, SimulatedCloud, cloud_run, controller, option

from forerun.cloud.control.controller import Controller
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.provider import CloudUnavailable, Failure, NameTaken, SliceState
from forerun.cloud.record.entries import CloudRun, EndEntry
from forerun.errors import StorageError, UserError

PRICES = {"v6e-8": 10.0}
CAP_USD = 5.0
ONE_POLL_USD = 10.0 * 5 / 3600
LIMIT_SECONDS = 1800.0


class TimeOver(Exception):
    """The simulated time of a test is over."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "401": lambda: UserError("E-CLOUD-014", "credentials", why="401", fix="sign in"),
    "403": lambda: UserError("E-CLOUD-016", "permission", why="403", fix="doctor"),
    "bucket denied": lambda: UserError("E-DATA-170", "bucket denied", why="403", fix="role"),
    "5xx": lambda: CloudUnavailable("HTTP status 503"),
    "bucket does not answer": lambda: StorageError("E-DATA-172", "bucket", why="503", fix="wait"),
    "no connection": lambda: ConnectionError("no route"),
    "wrong form": lambda: KeyError("state"),
}
CALLS = ("bucket", "status", "list", "now", "delete", "addresses")


def new_cloud(*, work_seconds: float = 1e9, queue_seconds: float = 20.0) -> SimulatedCloud:
    cloud = SimulatedCloud(PRICES, work_seconds=work_seconds, queue_seconds=queue_seconds)
    cloud.files().create_run(cloud_run(max_usd=CAP_USD))
    return cloud


def follow(
    cloud: SimulatedCloud, one: Controller, seconds: float = 9000, event: Callable[[], None] = lambda: None
) -> str:
    """Return why the run ended, or "" if it has not ended after `seconds`."""
    end_at = cloud.now + seconds

    def sleep(pause: float) -> None:
        cloud.advance(pause)
        event()
        if cloud.now > end_at:
            raise TimeOver

    try:
        _, end = one.follow(sleep)
    except TimeOver:
        return ""
    assert end is not None
    return end.reason


def fail(cloud: SimulatedCloud, call: str, error: str, after: float, before: float) -> None:
    """Let each call of a kind fail between two times after the start."""

    def fault(name: str) -> None:
        if name == call and after <= cloud.now - START < before:
            raise ERRORS[error]()

    cloud.fault = fault


def troubles(one: Controller) -> str:
    assert isinstance(one.display, RecordedDisplay)
    return "\n".join(one.display.troubles)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["bucket", "status", "now"])
def test_a_controller_continues_after_calls_were_refused_for_ten_minutes(call: str, error: str) -> None:
    cloud = new_cloud(work_seconds=900)
    fail(cloud, call, error, 60, 660)
    one = controller(cloud)
    assert follow(cloud, one) == "finished"
    assert cloud.slices == {}
    assert len(cloud.past) == 1, "hosts that could not be seen were not lost"
    if call != "now":  # the time since the last answer is enough
        assert next(iter(getattr(ERRORS[error](), "code", "").split()), "") in troubles(one)
        assert troubles(one) != ""


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["bucket", "status", "list", "now", "addresses"])
@pytest.mark.parametrize("after", [15, 400])
def test_the_deadline_holds_while_calls_are_refused_for_ever(call: str, error: str, after: float) -> None:
    """`after` 15 s, the slice is requested and not ready; after 400 s, the hosts train."""
    cloud = new_cloud()
    fail(cloud, call, error, after, 1e9)
    follow(cloud, controller(cloud))
    assert cloud.slices == {}
    assert len(cloud.past) >= 1
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD


@pytest.mark.parametrize("error", ["401", "403", "5xx", "wrong form"])
def test_a_refused_deletion_is_repeated_until_it_succeeds(error: str) -> None:
    cloud = new_cloud()
    fail(cloud, "delete", error, 60, 5000)
    one = controller(cloud)
    assert follow(cloud, one) == "budget"
    assert cloud.slices == {}
    (slice_,) = cloud.past
    assert slice_.ended_at is not None
    assert slice_.ended_at <= START + 5000 + 15
    assert "delet" in troubles(one) or "5" in troubles(one)


@pytest.mark.parametrize("error", ["401", "403", "bucket denied"])
def test_an_error_before_anything_is_rented_ends_the_control(error: str) -> None:
    cloud = new_cloud()
    cloud.fault = lambda call: _raise(ERRORS[error]()) if call == "list" else None
    with pytest.raises(UserError) as raised:
        controller(cloud).follow(cloud.advance)
    assert raised.value.code == ERRORS[error]().code  # type: ignore[attr-defined]
    assert cloud.created == []


def test_a_first_request_that_is_an_error_of_the_user_ends_the_control() -> None:
    cloud = new_cloud()
    cloud.fault = lambda call: _raise(ERRORS["403"]()) if call == "create" else None
    with pytest.raises(UserError) as raised:
        controller(cloud).follow(cloud.advance)
    assert raised.value.code == "E-CLOUD-016"


def test_a_request_whose_answer_was_lost_is_not_given_up() -> None:
    """The slice exists, and the second try of the request was refused."""
    cloud = new_cloud(work_seconds=300)
    one = controller(cloud)
    provider = one.providers["tpu"]
    create = provider.create
    tries = []

    def create_and_refuse(request: object) -> None:
        create(request)  # type: ignore[arg-type]
        if not tries:
            tries.append(1)
            raise ERRORS["401"]()

    provider.create = create_and_refuse  # type: ignore[method-assign]
    assert follow(cloud, one) == "finished"
    assert cloud.slices == {}


def test_the_slice_of_another_run_is_left_alone() -> None:
    cloud = new_cloud()
    error = NameTaken("E-CLOUD-022", "of another run", why="", fix="")
    cloud.fault = lambda call: _raise(error) if call == "create" else None
    with pytest.raises(UserError) as raised:
        controller(cloud).follow(cloud.advance)
    assert raised.value.code == "E-CLOUD-022"


def test_a_bucket_that_refuses_the_summary_does_not_hold_the_process() -> None:
    cloud = new_cloud(work_seconds=300)
    one = controller(cloud)

    def fault(call: str) -> None:
        if call == "bucket" and cloud.past:
            raise ERRORS["bucket denied"]()

    cloud.fault = lambda call: None
    end = one.follow(cloud.advance, until=lambda view: bool(cloud.past))[1]
    assert end is None
    one._step()  # the end is verified
    assert one.ledger.open == []


@pytest.mark.parametrize("clock_error", [-1e6, -7200.0, 7200.0])
@pytest.mark.parametrize("answers", [1, 100_000])
def test_a_wrong_clock_of_the_cloud_prolongs_nothing(clock_error: float, answers: int) -> None:
    cloud = new_cloud()
    one = controller(cloud)
    wrong = iter(range(answers))

    def fault(call: str) -> None:
        if call == "now" and cloud.now - START >= 300:
            cloud.clock_error = 0.0 if next(wrong, None) is None else clock_error

    cloud.fault = fault
    assert follow(cloud, one) == "budget"
    assert cloud.slices == {}
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD
    if clock_error < 0 or answers == 1:
        assert cloud.trained_seconds > 1200, "a clock that is slow, or wrong in one answer, does not shorten the run"


def test_a_machine_that_was_suspended_deletes_at_its_first_look() -> None:
    cloud = new_cloud()
    one = controller(cloud)
    asleep = [0.0]
    one.clock._elapsed = lambda: cloud.now - asleep[0]
    cloud.train(100, one)
    cloud.advance(36000)
    asleep[0] = 36000  # the machine's own clock stood still
    one.step()
    one.step()
    cloud.advance(5)
    one.step()
    one.step()
    assert cloud.slices == {}


def restarted(cloud: SimulatedCloud, file: Path, run: CloudRun) -> Controller:
    """Return the controller of a new process on the same machine, whose user agreed to `run` again."""
    one = controller_of(cloud, run, RunLedger(file))
    return one


def controller_of(cloud: SimulatedCloud, run: CloudRun, ledger: RunLedger) -> Controller:
    contents = dict(cloud.contents)
    cloud.files().replace_run(run)
    one = controller(cloud, f"process {cloud.now}", since=cloud.now, ledger=ledger)
    cloud.contents.clear()
    cloud.contents.update(contents)
    return one


def forged_ends(cloud: SimulatedCloud) -> None:
    for number in range(1, 50):
        name = f"cloud/attempts/{number:03}-end.json"
        if name in cloud.contents:
            cloud.contents[name] = b'{"at": 1.0, "reason": "preempted", "usd": 0.0, "detail": "", "failure": ""}'


@pytest.mark.parametrize("change", [forged_ends, lambda cloud: cloud.contents.clear()])
@pytest.mark.parametrize("alive", [False, True])
def test_the_costs_of_this_machine_hold_after_a_restart(
    change: Callable[[SimulatedCloud], None], alive: bool, tmp_path: Path
) -> None:
    """Each process trains for a part of the budget and is killed, and then the record is forged or deleted."""
    cloud, file, run = new_cloud(), tmp_path / "ledger.json", cloud_run(max_usd=CAP_USD)
    reasons = []
    for _ in range(8):
        one = restarted(cloud, file, run)
        trained = cloud.trained_seconds
        for _ in range(120):
            _, action = one.step()
            cloud.advance(5)
            if cloud.trained_seconds > trained + 400:
                break
        reasons.append(type(action).__name__)
        if not alive:
            cloud.preempt()
            one.step()
            one.step()
        change(cloud)
    follow(cloud, restarted(cloud, file, run))
    assert cloud.slices == {}
    assert 3.0 < cloud.bill() <= CAP_USD + ONE_POLL_USD * (1 + len(cloud.past))


def test_a_slice_is_found_again_when_its_record_is_deleted(tmp_path: Path) -> None:
    cloud, file, run = new_cloud(), tmp_path / "ledger.json", cloud_run(max_usd=CAP_USD)
    one = restarted(cloud, file, run)
    cloud.train(100, one)
    cloud.contents.clear()
    follow(cloud, restarted(cloud, file, run))
    assert len(cloud.created) == 1
    assert cloud.slices == {}
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD


def test_a_slice_without_any_record_is_deleted() -> None:
    """Both the record and the ledger are lost. The labels of the slice are enough."""
    cloud = new_cloud()
    one = controller(cloud)
    cloud.train(100, one)
    (name,) = [name for name, _ in cloud.slices]
    cloud.slices = {("forerun-sim-7", "us-east1-d"): next(iter(cloud.slices.values()))}
    request = cloud.slices["forerun-sim-7", "us-east1-d"].request
    changed = replace(request, name="forerun-sim-7", labels=request.labels | {"forerun-attempt": "7"})  # type: ignore[operator]
    cloud.slices["forerun-sim-7", "us-east1-d"].request = changed
    assert name == "forerun-sim-1"
    cloud.contents.clear()
    cloud.files().create_run(cloud_run(max_usd=CAP_USD))
    controller(cloud).step()
    assert ("forerun-sim-7", "us-east1-d") not in cloud.slices


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b'{"attempts": [{"entry": 1}]}', b"\xff" * 99])
def test_a_damaged_ledger_is_reported_and_the_record_counts(content: bytes, tmp_path: Path) -> None:
    cloud, file = new_cloud(), tmp_path / "ledger.json"
    one = controller(cloud, ledger=RunLedger(file))
    cloud.train(400, one)
    cloud.preempt()
    for _ in range(3):
        one.step()
    file.write_bytes(content)
    again = controller(cloud, since=cloud.now, ledger=RunLedger(file))
    assert str(file) in again.ledger.problem
    assert follow(cloud, again) == "budget"
    assert str(file) in troubles(again)
    assert cloud.bill() <= CAP_USD + ONE_POLL_USD * 2
    assert RunLedger(file).problem == "", "the file is written again"


def test_an_attempt_that_nothing_describes_counts_with_the_complete_cap() -> None:
    cloud = new_cloud()
    one = controller(cloud)
    cloud.train(400, one)
    cloud.preempt()
    for _ in range(3):
        one.step()
    assert len(cloud.created) == 2
    del cloud.contents["cloud/attempts/001.json"], cloud.contents["cloud/attempts/001-end.json"]
    view, _ = controller(cloud).step()
    assert view.unknown_usd == {1: CAP_USD}


def test_an_attempt_with_a_damaged_end_counts_with_its_limit() -> None:
    cloud = new_cloud()
    cloud.tells_times = False
    one = controller(cloud)
    cloud.train(400, one)
    cloud.preempt()
    for _ in range(2):
        one.step()
    entry = cloud.files().attempts()[1]
    cloud.slices.clear()
    cloud.contents["cloud/attempts/001-end.json"] = b"x"
    del cloud.contents["cloud/attempts/001-ready.json"]
    again = controller(cloud, since=cloud.now)
    again.step()
    end = again.ledger.attempts[1].end
    assert isinstance(end, EndEntry)
    assert end.usd == pytest.approx(entry.limit_seconds * 10 / 3600)  # type: ignore[union-attr,operator]


def test_two_processes_share_a_ledger(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    cloud = new_cloud()
    one = controller(cloud, "one", ledger=RunLedger(file))
    other = controller(cloud, "other", ledger=RunLedger(file))
    cloud.train(200, one, other)
    known = RunLedger(file).attempts[1]
    assert known.ready_at == pytest.approx(START + 20, abs=6)
    assert known.end is None
    cloud.refuse["us-east1-d"] = Failure.PERMISSION
    cloud.preempt()
    for _ in range(3):
        one.step()
    assert RunLedger(file).attempts[1].end is not None
    other.step()
    assert {number: known.end is not None for number, known in RunLedger(file).attempts.items()}[1]


def test_a_ledger_that_cannot_be_written_does_not_end_the_control(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("not a folder")
    cloud = new_cloud(work_seconds=60)
    one = controller(cloud, ledger=RunLedger(tmp_path / "folder" / "ledger.json"))
    assert follow(cloud, one) == "finished"
    assert str(tmp_path) in troubles(one)


def test_options_of_another_run_are_ended_and_not_continued() -> None:
    """The record has an attempt in a zone that the user of this controller did not choose."""
    cloud = new_cloud()
    one = controller(cloud)
    cloud.train(100, one)
    cloud.files().replace_run(cloud_run(option("zone-b"), max_usd=CAP_USD))
    again = controller(cloud, since=cloud.now)
    cloud.advance(70)  # the lease of the first one ends
    for _ in range(4):
        again.step()
    assert ("forerun-sim-1", "us-east1-d") not in cloud.slices
    assert cloud.created[-1][1] == "zone-b"
    (first,) = [one for one in cloud.past if one.request.zone == "us-east1-d"]
    assert first.state is not SliceState.PREEMPTED


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(("hours", "reason"), [(2.4, ""), (2.6, "budget")])
def test_a_keeper_whose_bucket_never_answers_ends_when_it_alone_has_cost_the_cap(hours: float, reason: str) -> None:
    """A cap of $5 is 2.5 hours of a keeper at $2."""
    cloud = new_cloud()
    run = replace(cloud_run(max_usd=CAP_USD), keeper=True, keeper_at=START, keeper_usd_per_hour=2.0)
    cloud.files().replace_run(run)
    one = controller(cloud, holder="keeper")
    fail(cloud, "bucket", "bucket does not answer", 0, 1e9)
    assert follow(cloud, one, hours * 3600) == reason
    assert cloud.created == []


def test_a_controller_that_was_suspended_after_its_decision_requests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = new_cloud()
    one = controller(cloud)
    one.step()  # starts an attempt
    with monkeypatch.context() as patch:
        patch.setattr(one.display, "show", lambda view, action: cloud.advance(120))
        one.step()
    assert cloud.created == []
    one.step()
    assert len(cloud.created) == 1
