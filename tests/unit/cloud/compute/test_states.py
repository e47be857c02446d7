"""The state of a slice, from answers of Compute Engine."""

from __future__ import annotations

from typing import Any

from forerun.cloud.compute.states import absent_status, group_status
from forerun.cloud.provider import SliceState

START = 1_767_225_600.0  # 2026-01-01T00:00:00Z


def operation(kind: str, machine: str, begin: str, end: str, **values: Any) -> dict[str, Any]:
    times = {"insertTime": f"2026-01-01T00:{begin}Z", "endTime": f"2026-01-01T00:{end}Z"}
    target = f"https://compute.googleapis.com/compute/v1/projects/p/zones/z/instances/{machine}"
    return {"operationType": kind, "status": "DONE", "targetLink": target, **times, **values}


FAILED = operation("insert", "s-2", "00:00", "00:05", error={"errors": [{"code": "QUOTA_EXCEEDED"}]})
INSERTIONS = [operation("insert", "s-0", "00:00", "01:00"), operation("insert", "s-1", "00:00", "02:00"), FAILED]
PREEMPTION = operation("compute.instances.preempted", "s-1", "09:00", "10:00")
STABLE = {"status": {"isStable": True}}


def test_a_slice_that_is_gone_was_billed_from_its_first_machine_to_its_last_operation() -> None:
    status = absent_status("s", [PREEMPTION, *INSERTIONS])
    assert status.state is SliceState.ABSENT
    assert (status.ready_at, status.ended_at) == (START + 60, START + 600)


def test_a_group_that_lost_a_machine_is_billed_while_another_one_exists() -> None:
    instance = {"status": "RUNNING", "creationTimestamp": "2026-01-01T00:00:30Z"}
    operations = [*INSERTIONS, PREEMPTION]
    partial = group_status(STABLE, [], [instance], operations, 2, "spot")
    assert (partial.state, partial.ready_at, partial.ended_at) == (SliceState.PREEMPTED, START + 60, None)
    empty = group_status(STABLE, [], [], operations, 2, "spot")
    assert (empty.state, empty.ready_at, empty.ended_at) == (SliceState.PREEMPTED, START + 60, START + 600)
