"""The status, the time and the cost of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_records import CPU, START, TPU, metrics_rows, write_run

from forerun.hardware.prices import cheapest
from forerun.report.page import figures
from forerun.report.run_facts import run_facts
from forerun.report.run_record import RunRecord, read_run

DONE = {"steps": 20, "device": CPU}


def record(tmp_path: Path, **files: object) -> RunRecord:
    return read_run(write_run(tmp_path / "short", metrics_rows(), **files))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("summary", "events", "later_seconds", "status"),
    [
        (DONE, [], 1e6, "finished"),
        (None, [], 10, "stopped"),  # a run that could not write its events
        (None, [{"event": "start", "unix_seconds": START}], 10, "interrupted"),
        (None, [{"event": "stop", "unix_seconds": START + 20}], 10, "stopped"),
        ({"steps": 10}, [{"event": "start", "unix_seconds": START}], 10, "interrupted"),
    ],
)
def test_status(tmp_path: Path, summary: object, events: object, later_seconds: float, status: str) -> None:
    found = record(tmp_path, summary=summary, events=events)
    assert run_facts(found, now=START + 20 + later_seconds).status.state == status


def test_a_folder_without_records_has_not_started(tmp_path: Path) -> None:
    assert run_facts(read_run(write_run(tmp_path / "new", []))).status.state == "not started"


def test_results(tmp_path: Path) -> None:
    facts = run_facts(record(tmp_path, summary=DONE))
    assert (facts.step, facts.steps) == (20, 20)
    assert facts.first_loss == pytest.approx(4.9)
    assert facts.final_loss == pytest.approx(3.0)
    assert facts.best_validation == (20, pytest.approx(3.5))
    assert facts.wall_seconds == pytest.approx(19)  # between the first and the last row
    assert facts.cost.measured_seconds == 0.5


def test_the_time_of_events_has_categories(tmp_path: Path) -> None:
    events = [
        {"unix_seconds": START, "event": "start", "session": 1},
        {"unix_seconds": START + 4, "event": "time", "session": 1, "step": 2, "seconds": {"startup": 1, "useful": 3}},
    ]
    facts = run_facts(record(tmp_path, events=events))
    assert facts.wall_seconds == 4
    assert facts.seconds == {"startup": 1, "useful": 3}
    assert facts.useful_share == 0.75


def test_restarts_have_their_step_and_their_time(tmp_path: Path) -> None:
    events = [
        {"unix_seconds": START, "event": "start", "session": 1},
        {"unix_seconds": START, "event": "resume", "session": 1, "step": 0},
        {"unix_seconds": START + 9, "event": "resume", "session": 2, "step": 8},
    ]
    assert run_facts(record(tmp_path, events=events)).restarts == [(8, 9.0)]


def test_the_cost_of_a_chip_with_two_devices_counts_chips(tmp_path: Path) -> None:
    device = TPU | {"chip": "v3", "count": 8}
    cost = run_facts(record(tmp_path, summary=DONE | {"device": device})).cost
    price = cheapest("v3")
    assert price is not None
    assert cost.chips == 4
    assert cost.usd(1800) == pytest.approx(4 * 0.5 * price.usd_per_chip_hour_on_demand)


def test_an_unknown_chip_has_no_cost(tmp_path: Path) -> None:
    cost = run_facts(record(tmp_path, summary=DONE | {"device": TPU | {"chip": "v99"}})).cost
    assert cost.usd(10) is None
    assert "v99" in cost.reason


def test_reads_of_a_bucket(tmp_path: Path) -> None:
    counts = {"data_requests": 1200, "data_read_bytes": 5_000_000, "data_damaged_blocks": 2, "data_failed_requests": 1}
    found = record(tmp_path, summary=DONE | counts)
    facts = run_facts(found)
    assert facts.data_reads == {"requests": 1200, "read_bytes": 5_000_000, "damaged_blocks": 2, "failed_requests": 1}
    ((_, value, remark),) = [row for row in figures(found, facts) if row[0] == "data requests"]
    assert "1,200" in value
    assert "2" in remark


def test_a_run_without_a_bucket_has_no_reads(tmp_path: Path) -> None:
    found = record(tmp_path, summary=DONE)
    assert run_facts(found).data_reads == {}
    assert "data requests" not in [row[0] for row in figures(found, run_facts(found))]
