"""Workers on several slices get the variables that jax and libtpu read."""

from __future__ import annotations

import inspect

import pytest
from error_assertions import assert_error

from forerun.errors import UserError
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.messages import StartWorker
from forerun.supervise.supervisor import attempt_variables, slice_variables


def variables(index: int, count: int, slices: int | None, **environment: str) -> dict[str, str]:
    return slice_variables(Hosts(index, count, "10.0.0.1", 9000 if count > 1 else 0), slices, environment)


def test_hosts_of_a_slice_are_consecutive() -> None:
    found = [variables(index, 8, 2) for index in range(8)]
    assert [int(one["MEGASCALE_SLICE_ID"]) for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {one["MEGASCALE_NUM_SLICES"] for one in found} == {"2"}
    assert {one["MEGASCALE_COORDINATOR_ADDRESS"] for one in found} == {"10.0.0.1"}


def test_jax_reads_these_names() -> None:
    from jax._src.clusters import cloud_tpu_cluster

    source = inspect.getsource(cloud_tpu_cluster)
    assert all(f"get_tpu_env_value('{name}')" in source for name in variables(0, 8, 2))


@pytest.mark.parametrize(("count", "slices"), [(8, None), (8, 1), (1, 2)])
def test_other_runs_need_none(count: int, slices: int | None) -> None:
    assert variables(0, count, slices) == {}


def test_variables_of_the_cloud_are_kept() -> None:
    assert variables(0, 8, 2, MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="1") == {}


@pytest.mark.parametrize(("count", "environment"), [(3, {}), (8, {"MEGASCALE_NUM_SLICES": "4"})])
def test_hosts_that_do_not_divide(count: int, environment: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        variables(0, count, 2, **environment)
    assert_error(caught.value, "E-HOSTS-034")


def test_the_remaining_slices_are_numbered_anew() -> None:
    """The second of three slices is lost. Host 4 is the first one of the third slice, and has the rank 2."""
    order = StartWorker(7, 2, 4, 2)
    cloud = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.9"}
    for environment, address in (({}, "10.0.0.1"), (cloud, "10.0.0.9")):
        found = attempt_variables(Hosts(4, 6, "10.0.0.1", 9000), 3, environment, order)
        assert found == {**cloud, "MEGASCALE_COORDINATOR_ADDRESS": address} | {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
        }


def test_one_remaining_slice_needs_no_variables() -> None:
    found = attempt_variables(Hosts(0, 4, "10.0.0.1", 9000), 2, {}, StartWorker(7, 0, 2, 1))
    assert set(found.values()) == {""}, "empty ones are removed"
