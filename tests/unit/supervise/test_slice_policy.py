"""Which hosts may continue when some are lost."""

from __future__ import annotations

import pytest

from forerun.supervise.slice_policy import SlicePolicy


@pytest.mark.parametrize(
    ("absent", "remaining"),
    [
        ([4], (0, 1, 2, 3)),  # one host of the last slice: the other one of it cannot compute alone
        ([2, 3], (0, 1, 4, 5)),
        ([2, 5], ()),  # two slices are lost, and two are needed
        ([1], ()),  # the slice of the leader
    ],
)
def test_complete_slices_remain_if_they_are_enough(absent: list[int], remaining: tuple[int, ...]) -> None:
    assert SlicePolicy.of(6, 3, 2, 60.0).remaining_hosts(absent) == remaining


def test_without_the_key_no_slice_may_be_lost() -> None:
    assert SlicePolicy.of(6, 3, None, 60.0).remaining_hosts([4]) == ()


@pytest.mark.parametrize(("hosts", "slices"), [(1, 2), (3, 2), (4, None)])
def test_other_runs_do_not_count_slices(hosts: int, slices: int | None) -> None:
    policy = SlicePolicy.of(hosts, slices, None, 60.0)
    assert policy.count_of(range(hosts)) is None
    assert not policy.is_elastic
