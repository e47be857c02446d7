"""The rows of `forerun ps`: costs, states and deadlines against values that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_cloud import START, ListedProvider, act, option, recorded_run, started

from forerun.cloud import labels
from forerun.cloud.provider import Resource, SliceState, SliceStatus
from forerun.cloud.record.entries import (
    BROKEN,
    STARTING,
    TRAINING,
    AttemptEntry,
    EndEntry,
    FinishEntry,
    HostEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.view.run_rows import host_phase, rows_of, runs_without_resources, state_of_run
from forerun.cloud.view.snapshot import RecordSnapshot, read_snapshot

FOLDER = Path("/records/quick")
ENTRY = AttemptEntry(2, option(), "forerun-quick-2", START, 7200, 1.0)
NODE = Resource(
    "tpu",
    "node",
    "forerun-quick-2",
    "us-east1-d",
    SliceStatus(SliceState.READY, "READY", ready_at=START),
    labels.slice_labels("quick", 2),
    {labels.FOLDER: str(FOLDER), labels.USD_PER_HOUR: "10", labels.MAX_USD: "40"},
    "v6e-8",
    "spot",
    START - 60,
)


def snapshot(*phases: str, step: int | None = None, at: float = START) -> RecordSnapshot:
    """Two attempts: the first cost $1, the second is ready since START."""
    return RecordSnapshot(
        recorded_run(FOLDER),
        {1: replace(ENTRY, number=1), 2: ENTRY},
        {1: ReadyEntry(START - 900), 2: ReadyEntry(START)},
        {1: EndEntry(START - 540, "preempted", 1.0)},
        {host: HostEntry(2, host, at, phase, step) for host, phase in enumerate(phases)},
    )


def test_a_row_has_the_cost_of_all_attempts_the_cap_and_the_deadline() -> None:
    now = START + 3600
    (row,) = rows_of([NODE], {str(FOLDER): snapshot(TRAINING, TRAINING, step=120, at=now - 5)}, now)
    assert (row.run, row.kind, row.slice, row.zone, row.capacity) == ("quick", "slice", "v6e-8", "us-east1-d", "spot")
    assert (row.state, row.step, row.total_steps) == ("training", 120, 600)
    assert row.usd == pytest.approx(1.0 + 10.0)
    assert (row.max_usd, row.usd_per_hour, row.is_billed) == (40.0, 10.0, True)
    assert row.deadline == START + 7200


def test_a_row_without_a_record_uses_the_metadata() -> None:
    (row,) = rows_of([NODE], {}, START + 1800)
    assert (row.run, row.state, row.step, row.deadline) == ("quick", "ready", None, None)
    assert row.usd == pytest.approx(5.0)
    assert (row.max_usd, row.usd_per_hour) == (40.0, 10.0)
    (row,) = rows_of([replace(NODE, metadata={})], {}, START + 1800)
    assert (row.usd, row.usd_per_hour, row.is_billed) == (None, None, True)


def test_all_resources_of_a_slice_are_one_row() -> None:
    queued = replace(NODE, kind="queued resource", slice="", status=SliceStatus(SliceState.READY), costs_money=False)
    disk = replace(NODE, kind="disk", name="data", slice="")
    for resources in ([NODE, queued, disk], [disk, queued, NODE]):
        (row,) = rows_of(resources, {}, START)
        assert (row.kind, row.resource, row.costs_money) == ("slice", "forerun-quick-2", True)
    (row,) = rows_of([replace(queued, status=SliceStatus(SliceState.WAITING))], {}, START)
    assert (row.kind, row.state, row.costs_money, row.is_billed) == ("queued resource", "waiting", False, False)
    assert len(rows_of([NODE, replace(NODE, labels=labels.slice_labels("quick", 3))], {}, START)) == 2


def test_a_keeper_has_its_own_row_after_the_slice() -> None:
    keeper = replace(
        NODE,
        provider="compute",
        kind="instance",
        name="forerun-quick-keeper",
        labels={labels.RUN: "quick", labels.ROLE: labels.KEEPER_ROLE},
        metadata={labels.FOLDER: str(FOLDER), labels.USD_PER_HOUR: "0.02"},
        slice="e2-small",
    )
    rows = rows_of([keeper, NODE], {str(FOLDER): snapshot(TRAINING, TRAINING, step=3)}, START)
    assert [(row.kind, row.step, row.usd_per_hour) for row in rows] == [("slice", 3, 10.0), ("keeper", None, 0.02)]


def test_the_cost_of_a_run_contains_its_keepers() -> None:
    found = snapshot(TRAINING, TRAINING)
    run = replace(found.run, keeper=True, keeper_usd_per_hour=0.1, keeper_at=START - 3600, keeper_spent_usd=0.5)
    assert replace(found, run=run).usd(START + 3600) == pytest.approx(1.0 + 10.0 + 0.5 + 0.2)
    ends = {**found.ends, 2: EndEntry(START + 3600, "finished", 10.0)}
    ended = replace(found, run=run, ends=ends, finished=FinishEntry(START + 3600, 2, {}))
    assert ended.usd(START + 99_999) == pytest.approx(1.0 + 10.0 + 0.5 + 0.2)  # the keeper ended with the run


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((), "installing"),
        ((TRAINING,), "installing"),  # the other host has not reported
        ((TRAINING, STARTING), "starting"),
        ((TRAINING, BROKEN), "broken"),
        ((TRAINING, "stopping"), "stopping"),
        (("stopped", "stopped"), "stopped"),
    ],
)
def test_a_slice_is_as_far_as_its_slowest_host(phases: tuple[str, ...], expected: str) -> None:
    assert host_phase(snapshot(*phases)) == expected


def test_states_of_machines_come_before_reports_of_hosts() -> None:
    record = {str(FOLDER): snapshot(TRAINING, TRAINING)}
    states = {}
    for state in (SliceState.PREEMPTED, SliceState.DELETING, SliceState.READY):
        (row,) = rows_of([replace(NODE, status=SliceStatus(state))], record, START + 10)
        states[state.value] = row.state, row.is_billed
    assert states == {
        "preempted": ("preempted", False),
        "deleting": ("deleting", False),
        "ready": ("training", True),
    }
    (row,) = rows_of([NODE], record, START + 181)
    assert row.state == "no report"


def test_runs_without_resources() -> None:
    ended = replace(snapshot(), ends={1: EndEntry(START, "preempted", 1.0), 2: EndEntry(START, "stopped", 2.0)})
    finished = replace(ended, finished=FinishEntry(START, 2, {}))
    records = {"a": replace(ended, stop=StopEntry(START, "forerun stop")), "b": ended, "c": finished}
    assert runs_without_resources((), records, ended=False) == (ended,)
    assert len(runs_without_resources((), records, ended=True)) == 3
    (row,) = rows_of([replace(NODE, metadata={labels.FOLDER: "b"})], records, START)
    assert runs_without_resources((row,), records, ended=False) == ()
    assert state_of_run(finished, START) == "finished"
    assert "laptop" in state_of_run(replace(ended, lease=LeaseEntry("laptop", START + 1)), START)
    assert "no controller" in state_of_run(replace(ended, lease=LeaseEntry("laptop", START)), START)
    failed = replace(ended, ends={**ended.ends, 2: EndEntry(START, "failed", 2.0, "exit code 2")})
    assert state_of_run(failed, START) == "failed: exit code 2"
    assert failed.is_over


def test_the_snapshot_of_a_run_that_trains(tmp_path: Path) -> None:
    cloud, controller = started(tmp_path / "quick")
    act(cloud, controller, 300)
    found = read_snapshot(cloud.files())
    assert found is not None
    (row,) = rows_of(ListedProvider(cloud).list(), {str(cloud.folder): found}, cloud.now)
    assert (row.state, row.step) == ("training", int(cloud.trained_seconds))
    assert row.usd == pytest.approx(cloud.bill(), abs=0.005)
    (ready,) = found.ready.values()
    assert row.deadline == ready.at + 4 * 3600  # $40 at $10 per hour
    assert found.controller(cloud.now) == "laptop"


def test_a_folder_without_a_record_has_no_snapshot(tmp_path: Path) -> None:
    cloud, _ = started(tmp_path / "quick")
    cloud.files().files.remove("run.json")
    assert read_snapshot(cloud.files()) is None
