"""States of slices that the cloud remembers from earlier runs."""

import pytest

from forerun.cloud.control.observation import own_status
from forerun.cloud.provider import SliceState, SliceStatus
from forerun.cloud.record.entries import AttemptEntry, Option

ENTRY = AttemptEntry(1, Option("compute", "v6e-8", "z", "on-demand", 1, 21.6), "forerun-a-1", 1000.0, 3600, 0.0)
ABSENT = SliceStatus(SliceState.ABSENT)


@pytest.mark.parametrize(
    "old",
    [
        SliceStatus(SliceState.ABSENT, "delete", ready_at=100.0, ended_at=900.0),
        SliceStatus(SliceState.ABSENT, "", ready_at=100.0),
        SliceStatus(SliceState.FAILED, "no capacity", ended_at=900.0),
    ],
)
def test_an_earlier_slice_with_the_same_name_is_ignored(old: SliceStatus) -> None:
    assert own_status(old, ENTRY) == ABSENT


@pytest.mark.parametrize(
    "own",
    [
        SliceStatus(SliceState.ABSENT, "delete", ready_at=1100.0, ended_at=1900.0),
        SliceStatus(SliceState.FAILED, "no capacity", ended_at=1001.0),
        SliceStatus(SliceState.FAILED, "no capacity"),
        SliceStatus(SliceState.READY, "RUNNING", ready_at=999.0),
        ABSENT,
    ],
)
def test_the_state_of_the_slice_itself_is_kept(own: SliceStatus) -> None:
    assert own_status(own, ENTRY) == own
