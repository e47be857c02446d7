"""The decisions of a controller, one view at a time."""

from dataclasses import replace

import pytest
from simulated_cloud import START, cloud_run, option

from forerun.cloud.control.actions import (
    DeliverJob,
    EndAttempt,
    EndRun,
    Pause,
    RecordReady,
    RequestSlice,
    RequestStop,
    StartAttempt,
)
from forerun.cloud.control.decide import decide, is_limit
from forerun.cloud.control.run_view import AttemptView, ControlView, HostReport
from forerun.cloud.provider import Failure, SliceState, SliceStatus
from forerun.cloud.record.entries import (
    AttemptEntry,
    EndEntry,
    FinishEntry,
    HostEntry,
    Option,
    ReadyEntry,
    StopEntry,
)

FIRST, SECOND = option("zone-a"), option("zone-b")
RUN = cloud_run(FIRST, SECOND)


def attempt(
    number: int = 1, where: Option = FIRST, created_at: float = START, limit: int | None = 3600
) -> AttemptEntry:
    return AttemptEntry(number, where, f"forerun-sim-{number}", created_at, limit, 0.0)


def view(
    state: SliceState | None = None, *, after: float = 100.0, ready: bool = False, **values: object
) -> ControlView:
    """Return a run with one attempt; it was created at START and became ready then, if at all."""
    current = AttemptView(attempt(), ReadyEntry(START) if ready else None)
    status = None if state is None else SliceStatus(state)
    base = ControlView(now=START + after, run=RUN, attempts=(current,), status=status)
    return replace(base, **values)  # type: ignore[arg-type]


def host(index: int, phase: str, *, silent: float = 0.0, lasts: float = 0.0, **values: object) -> HostReport:
    return HostReport(HostEntry(1, index, START, phase, **values), silent, lasts)  # type: ignore[arg-type]


def hosts(phase: str, **values: object) -> dict[int, HostReport]:
    return {index: host(index, phase, **values) for index in range(2)}  # type: ignore[arg-type]


def ended(*ends: tuple[Option, str, str], after: float = 0.0) -> ControlView:
    """Return a run without a slice, after attempts that ended at START."""
    attempts = tuple(
        AttemptView(attempt(number, where), None, EndEntry(START, reason, 1.0, "detail", failure))
        for number, (where, reason, failure) in enumerate(ends, 1)
    )
    return ControlView(now=START + after, run=RUN, attempts=attempts)


def test_a_new_run_starts_with_its_first_option_and_the_complete_budget() -> None:
    action = decide(ControlView(now=START, run=RUN))
    assert action == StartAttempt(AttemptEntry(1, FIRST, "forerun-sim-1", START, 14400, 0.0))


def test_a_slice_is_requested_once_and_given_time_to_appear() -> None:
    assert decide(view(SliceState.ABSENT)) == RequestSlice(attempt())
    assert isinstance(decide(view(SliceState.ABSENT, requested_at=START + 90)), Pause)
    late = decide(view(SliceState.ABSENT, after=300, requested_at=START + 90))
    assert isinstance(late, EndAttempt)
    assert (late.reason, late.failure) == ("refused", Failure.OTHER)


@pytest.mark.parametrize(
    ("state", "reason"),
    [(SliceState.FAILED, "refused"), (SliceState.STOPPED, "refused"), (SliceState.PREEMPTED, "preempted")],
)
def test_a_slice_that_never_becomes_ready_is_deleted(state: SliceState, reason: str) -> None:
    action = decide(view(state))
    assert isinstance(action, EndAttempt)
    assert action.reason == reason


def test_waiting_for_capacity_ends_if_there_is_another_option() -> None:
    assert isinstance(decide(view(SliceState.WAITING, after=590)), Pause)
    late = decide(view(SliceState.WAITING, after=610))
    assert isinstance(late, EndAttempt)
    assert (late.reason, late.failure) == ("refused", Failure.CAPACITY)
    alone = cloud_run(FIRST)
    assert isinstance(decide(view(SliceState.WAITING, after=1e6, run=alone)), Pause)
    patient = cloud_run(FIRST, SECOND, wait_seconds=7200)
    assert isinstance(decide(view(SliceState.WAITING, after=7000, run=patient)), Pause)


def test_billing_begins_when_the_api_says_so() -> None:
    status = SliceStatus(SliceState.READY, ready_at=START + 7)
    assert decide(view(status=status)) == RecordReady(attempt(), START + 7)
    assert decide(view(SliceState.READY)) == RecordReady(attempt(), START + 100)
    preempted = SliceStatus(SliceState.PREEMPTED, ready_at=START + 7)
    assert decide(view(status=preempted)) == RecordReady(attempt(), START + 7)


def test_a_job_is_delivered_until_all_hosts_report() -> None:
    assert decide(view(SliceState.READY, ready=True)) == DeliverJob(attempt())
    one = {0: host(0, "starting")}
    assert decide(view(SliceState.READY, ready=True, hosts=one)) == DeliverJob(attempt())
    assert isinstance(decide(view(SliceState.READY, ready=True, hosts=one, delivered=True)), Pause)
    assert isinstance(decide(view(SliceState.READY, ready=True, hosts=hosts("training"))), Pause)
    late = decide(view(SliceState.READY, ready=True, hosts=one, after=1900))
    assert isinstance(late, EndAttempt)
    assert late.reason == "broken"


@pytest.mark.parametrize("state", [SliceState.PREEMPTED, SliceState.FAILED, SliceState.STOPPED, SliceState.ABSENT])
def test_machines_that_are_gone_are_a_preemption(state: SliceState) -> None:
    action = decide(view(state, ready=True, hosts=hosts("training")))
    assert isinstance(action, EndAttempt)
    assert action.reason == "preempted"


def test_a_slice_that_its_hosts_delete_is_billed_until_the_deletion_is_complete() -> None:
    action = decide(view(SliceState.DELETING, ready=True, hosts=hosts("stopped")))
    assert isinstance(action, EndAttempt)
    assert action.at is None


def test_a_preemption_while_no_controller_ran_is_billed_until_the_last_report() -> None:
    """The laptop slept for two hours. The hosts report in the cloud's time, at least every 30 s."""
    current = AttemptView(replace(attempt(), limit_seconds=None), ReadyEntry(START))
    old = {index: HostReport(HostEntry(1, index, START + 500, "training")) for index in range(2)}
    action = decide(view(SliceState.PREEMPTED, after=7200, hosts=old, attempts=(current,)))
    assert isinstance(action, EndAttempt)
    assert action.at == START + 530
    soon = decide(view(SliceState.PREEMPTED, after=510, hosts=old, attempts=(current,)))
    assert isinstance(soon, EndAttempt)
    assert soon.at == START + 510


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({0: host(0, "training"), 1: host(1, "broken")}, "broken"),
        ({0: host(0, "training"), 1: host(1, "training", silent=181)}, "preempted"),
        ({0: host(0, "preempting", lasts=121), 1: host(1, "training")}, "preempted"),
        (hosts("stopped", exit_code=75), "preempted"),
        (hosts("preempting", exit_code=75), "preempted"),
        ({0: host(0, "training"), 1: host(1, "stopped", exit_code=2)}, "failed"),
        ({0: host(0, "training"), 1: host(1, "failed", exit_code=70)}, "failed"),
        ({0: host(0, "training", silent=181), 1: host(1, "failed", exit_code=70)}, "preempted"),
    ],
)
def test_reports_of_hosts_end_an_attempt(found: dict[int, HostReport], reason: str) -> None:
    action = decide(view(SliceState.READY, ready=True, hosts=found))
    assert isinstance(action, EndAttempt)
    assert action.reason == reason


def test_a_notice_of_preemption_gives_the_hosts_time_to_save() -> None:
    found = {0: host(0, "preempting", lasts=20), 1: host(1, "training", silent=170)}
    assert isinstance(decide(view(SliceState.READY, ready=True, hosts=found)), Pause)


def test_the_budget_stops_a_run_two_graces_before_its_deadline() -> None:
    """A save takes 20 s: one grace is 90 s, and the deadline is 3600 s after ready."""
    training = hosts("training", save_seconds=20.0)
    assert isinstance(decide(view(SliceState.READY, ready=True, hosts=training, after=3419)), Pause)
    assert decide(view(SliceState.READY, ready=True, hosts=training, after=3420)) == RequestStop("budget")


@pytest.mark.parametrize(("asked", "reason"), [("budget", "budget"), ("the user asked", "stopped")])
def test_a_stop_deletes_the_slice_after_the_save(asked: str, reason: str) -> None:
    stop = StopEntry(START + 90, asked)
    saving = view(SliceState.READY, ready=True, hosts=hosts("stopping"), stop=stop)
    assert isinstance(decide(saving), Pause)
    for later in (
        replace(saving, hosts=hosts("stopped", exit_code=75)),
        replace(saving, hosts={}),
        replace(saving, now=START + 90 + 120),
        replace(saving, status=SliceStatus(SliceState.ABSENT)),
    ):
        action = decide(later)
        assert isinstance(action, EndAttempt)
        assert action.reason == reason
    done = ControlView(now=START, run=RUN, stop=stop)
    assert decide(done) == EndRun(reason, asked)


def test_a_stop_before_ready_deletes_the_request() -> None:
    for state in (SliceState.ABSENT, SliceState.WAITING, SliceState.CREATING):
        action = decide(view(state, stop=StopEntry(START, "user")))
        assert isinstance(action, EndAttempt)
        assert action.reason == "stopped"


@pytest.mark.parametrize("state", list(SliceState))
def test_a_finished_run_deletes_its_slice_in_every_state(state: SliceState) -> None:
    finish = FinishEntry(START, 1, {})
    action = decide(view(state, ready=True, finished=finish))
    assert isinstance(action, EndAttempt)
    assert action.reason == "finished"
    assert decide(ControlView(now=START, run=RUN, finished=finish)) == EndRun("finished")


def chosen(found: ControlView) -> str:
    action = decide(found)
    assert isinstance(action, StartAttempt)
    return action.entry.option.zone


def test_the_same_zone_is_tried_first_after_a_preemption_and_the_next_after_a_refusal() -> None:
    assert chosen(ended((FIRST, "preempted", ""))) == "zone-a"
    assert chosen(ended((FIRST, "broken", ""))) == "zone-a"
    assert chosen(ended((FIRST, "preempted", ""), (FIRST, "refused", "capacity"))) == "zone-b"
    assert (
        chosen(ended((FIRST, "preempted", ""), (FIRST, "refused", "capacity"), (SECOND, "preempted", ""))) == "zone-b"
    )


def test_all_options_are_tried_before_a_pause_that_grows() -> None:
    cycle = ((FIRST, "refused", "capacity"), (SECOND, "refused", "quota"))
    assert decide(ended(*cycle)) == Pause("no option has capacity", START + 30)
    assert chosen(ended(*cycle, after=30)) == "zone-a"
    assert decide(ended(*cycle, *cycle)) == Pause("no option has capacity", START + 60)
    assert decide(ended(*cycle * 20)) == Pause("no option has capacity", START + 600)


def test_refusals_that_waiting_cannot_change_end_the_run() -> None:
    quota = ended((FIRST, "refused", "quota"), (SECOND, "refused", "quota"))
    assert decide(quota) == EndRun("failed", "v6e-8 in zone-a: detail; v6e-8 in zone-b: detail")
    assert chosen(ended((FIRST, "refused", "invalid"))) == "zone-b"
    assert chosen(ended((FIRST, "refused", "invalid"), (SECOND, "refused", "capacity"), after=600)) == "zone-b"
    action = decide(ended((FIRST, "refused", "permission"), (SECOND, "refused", "invalid")))
    assert isinstance(action, EndRun)
    resumed = replace(ended((FIRST, "refused", "permission"), (SECOND, "refused", "invalid")), since=START + 1)
    assert isinstance(decide(resumed), StartAttempt)


def test_three_broken_machines_in_sequence_end_the_run() -> None:
    assert chosen(ended(*[(FIRST, "broken", "")] * 2)) == "zone-a"
    action = decide(ended(*[(FIRST, "broken", "")] * 3))
    assert isinstance(action, EndRun)
    assert action.reason == "failed"


def test_a_job_that_failed_is_not_repeated_unless_the_user_resumes_it() -> None:
    failed = ended((FIRST, "failed", ""))
    assert decide(failed) == EndRun("failed", "detail")
    assert isinstance(decide(replace(failed, since=START + 1)), StartAttempt)


def test_attempts_share_the_budget() -> None:
    spent = ended((FIRST, "preempted", ""), (FIRST, "preempted", ""))
    action = decide(spent)
    assert isinstance(action, StartAttempt)
    assert (action.entry.number, action.entry.spent_usd) == (3, 2.0)
    assert action.entry.limit_seconds == 13680  # 38 USD at 10 USD an hour
    poor = replace(spent, run=cloud_run(FIRST, max_usd=2.2))
    assert isinstance(decide(poor), EndRun)
    assert decide(poor).reason == "budget"  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", [None, StopEntry(START + 3590, "user")])
@pytest.mark.parametrize("phase", ["starting", "training", "stopping"])
def test_nothing_delays_the_deletion_at_the_deadline(stop: StopEntry | None, phase: str) -> None:
    """The deadline is 3600 s after ready. A stop shortly before it does not add its own two graces."""
    late = view(SliceState.READY, ready=True, hosts=hosts(phase), stop=stop, after=3600)
    action = decide(late)
    assert isinstance(action, EndAttempt)
    assert action.reason == ("budget" if stop is None else "stopped")
    assert is_limit(late, action)


def test_a_lower_cap_moves_the_deadline_and_a_higher_one_does_not() -> None:
    assert view(SliceState.READY, ready=True, run=cloud_run(FIRST, max_usd=5.0)).deadline == START + 1800
    assert view(SliceState.READY, ready=True, run=cloud_run(FIRST, max_usd=500.0)).deadline == START + 3600


def test_a_recorded_end_is_verified_by_a_deletion() -> None:
    recorded = EndEntry(START + 20, "preempted", 0.05)
    current = AttemptView(attempt(), ReadyEntry(START), recorded_end=recorded, seen_at=START + 38)
    alive = view(SliceState.READY, attempts=(current,))
    assert decide(alive) == EndAttempt(attempt(), "preempted")
    assert is_limit(alive, decide(alive))
    gone = replace(alive, status=SliceStatus(SliceState.ABSENT))
    assert decide(gone) == EndAttempt(attempt(), "preempted", at=START + 38), "not before it was seen"
    assert alive.cost_usd == pytest.approx(10 * 38 / 3600)
    just_seen = replace(gone, attempts=(replace(current, seen_at=START + 95),))
    assert decide(just_seen) == EndAttempt(attempt(), "preempted", at=gone.now), "it may have run until now"


def test_a_slice_that_the_user_did_not_choose_is_ended() -> None:
    current = AttemptView(attempt(), ReadyEntry(START), is_foreign=True)
    action = decide(view(SliceState.READY, attempts=(current,), hosts=hosts("training")))
    assert isinstance(action, EndAttempt)
    assert action.reason == "stopped"


def test_a_controller_without_the_lease_rents_and_delivers_nothing() -> None:
    assert not is_limit(view(SliceState.ABSENT), RequestSlice(attempt()))
    assert not is_limit(view(SliceState.READY, ready=True), DeliverJob(attempt()))
    assert not is_limit(view(SliceState.READY, ready=True), EndAttempt(attempt(), "broken"))
    assert is_limit(view(SliceState.READY), RecordReady(attempt(), START))


def test_the_limit_of_an_attempt_contains_the_keeper() -> None:
    """$40 without 6 hours of the keeper at $2, at $10 for the slice and $2 for the keeper."""
    run = replace(cloud_run(FIRST), keeper=True, keeper_usd_per_hour=2.0)
    action = decide(ControlView(now=START, run=run))
    assert isinstance(action, StartAttempt)
    assert action.entry.limit_seconds == 8400
