"""The summary of a run, against numbers computed by hand, and the lines that a user sees."""

from __future__ import annotations

import json
from dataclasses import replace

from simulated_cloud import START, SimulatedCloud, cloud_run, controller, option

from forerun.cloud.control.actions import EndAttempt, EndRun, Pause, StartAttempt
from forerun.cloud.control.run_report import duration, event_text, program_text, run_summary, state_text, summary_lines
from forerun.cloud.control.run_view import AttemptView, ControlView, HostReport
from forerun.cloud.provider import SliceState, SliceStatus
from forerun.cloud.record.entries import AttemptEntry, EndEntry, HostEntry, ReadyEntry

FIRST = replace(option("zone-a"), hours=1.5, preemptions=0.4)
RUN = replace(cloud_run(FIRST, option("zone-b"), option("zone-c"), option("zone-d")), total_steps=900)


def attempt(number: int, where: str = "zone-a") -> AttemptEntry:
    return AttemptEntry(number, option(where), f"forerun-sim-{number}", START, 7200, 0.0)


def test_the_summary_compares_the_plan_with_the_run() -> None:
    ended = (
        AttemptView(attempt(1), ReadyEntry(START), EndEntry(START + 1800, "preempted", 5.0)),
        AttemptView(attempt(2), None, EndEntry(START + 1800, "refused", 0.0, "no capacity", "capacity")),
        AttemptView(attempt(3, "zone-b"), ReadyEntry(START + 2000), EndEntry(START + 5600, "finished", 10.0)),
    )
    found = run_summary(ControlView(now=START + 7200, run=RUN, attempts=ended), "finished")
    assert found["predicted"] == {"hours": 1.5, "usd": 15.0, "preemptions": 0.4}
    expected = {"hours": 1.5, "usd": 15.0, "keeper_usd": 0.0, "preemptions": 1, "refusals": 1, "elapsed_hours": 2.0}
    assert found["actual"] == expected
    assert [one["billed_hours"] for one in found["attempts"]] == [0.5, 0.0, 1.0]
    text = "\n".join(summary_lines(found))
    assert "$15.00" in text
    assert "0.4" in text


def test_the_controller_writes_the_summary_beside_the_record() -> None:
    cloud = SimulatedCloud({"v6e-8": 10.0})
    cloud.files().create_run(cloud_run())
    controller(cloud).follow(cloud.advance)
    written = json.loads(cloud.contents["cloud/summary.json"])
    assert written["end"] == "finished"
    assert written["actual"]["usd"] == cloud.bill()


def test_waiting_shows_how_long_where_and_the_alternatives() -> None:
    view = ControlView(
        now=START + 300, run=RUN, attempts=(AttemptView(attempt(1)),), status=SliceStatus(SliceState.WAITING)
    )
    text = state_text(view)
    for part in ("waiting for capacity", "v6e-8 in zone-a", "5 min", "zone-b", "$10.00/h", "zone-c", "1 more"):
        assert part in text


def test_training_shows_the_step_the_cost_and_the_rest_of_the_budget() -> None:
    hosts = {0: HostReport(HostEntry(1, 0, START, "training", 450)), 1: HostReport(HostEntry(1, 1, START, "starting"))}
    current = AttemptView(attempt(1), ReadyEntry(START))
    text = state_text(ControlView(now=START + 3600, run=RUN, attempts=(current,), hosts=hosts))
    for part in ("training (1 of 2 hosts)", "step 450 of 900", "$10.00 of $40.00", "1 h 00 min left"):
        assert part in text


def test_the_compiled_program_is_compared_with_the_plan() -> None:
    planned = replace(attempt(1), option=replace(FIRST, program="aaaaaaaaaaaa"))

    def text(program: str, detail: str = "", entry: AttemptEntry = planned) -> str | None:
        hosts = {0: HostReport(HostEntry(1, 0, START, "training", 1, detail, program=program))}
        current = AttemptView(entry, ReadyEntry(START))
        return program_text(ControlView(now=START, run=RUN, attempts=(current,), hosts=hosts))

    assert text("") is None
    assert text("aaaaaaaaaaaa", entry=attempt(1)) is None, "nothing was planned"
    assert "aaaaaaaaaaaa" in (text("aaaaaaaaaaaa") or "")
    assert text("bbbbbbbbbbbb", "program bbbbbbbbbbbb differs: jax") == "program bbbbbbbbbbbb differs: jax"


def test_events_name_the_resource_and_the_reason() -> None:
    assert "v6e-8 in zone-a" in (event_text(StartAttempt(attempt(1))) or "")
    deleted = event_text(EndAttempt(attempt(1), "preempted", "PREEMPTED")) or ""
    assert "forerun-sim-1" in deleted
    assert "preempted" in deleted
    assert "budget" in (event_text(EndRun("budget")) or "")
    assert event_text(Pause()) is None


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 119, 120, 3599, 3600, 12000, -5)] == [
        "0 s",
        "119 s",
        "2 min",
        "59 min",
        "1 h 00 min",
        "3 h 20 min",
        "0 s",
    ]
