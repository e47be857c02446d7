"""`forerun train` without --host finds the hosts of its TPU slice, and only there."""

from __future__ import annotations

import pytest
from error_assertions import raises_error

from forerun.hardware.maintenance_notice import metadata_url
from forerun.hardware.tpu_hosts import TpuHosts, find_tpu_hosts
from forerun.supervise.host_address import PORT, Hosts, discover, given
from forerun.supervise.supervisor import default_limits

FOUR = TpuHosts(2, ("10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"))


def found(
    device: str | tuple[str, ...], tpu: str | None = "/dev/accel0", hosts: TpuHosts | None = FOUR, **env: str
) -> Hosts | None:
    return discover(device, env, lambda: tpu, lambda: hosts)


@pytest.mark.parametrize("device", ["auto", "tpu", ("tpu", "cpu")])
def test_a_host_of_a_slice_is_found(device: str | tuple[str, ...]) -> None:
    assert found(device) == Hosts(2, 4, "10.0.0.2", PORT)
    assert found(device, JAX_PLATFORMS="tpu,cpu") == Hosts(2, 4, "10.0.0.2", PORT)


def test_other_runs_have_one_host() -> None:
    assert found("cpu") is None
    assert found("gpu") is None
    assert found("auto", tpu=None) is None
    assert found("auto", hosts=None) is None
    assert found("auto", hosts=TpuHosts(0, ("10.0.0.2",))) is None
    assert found("auto", JAX_PLATFORMS="cpu") is None
    for name in ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS"):
        assert discover("auto", {name: "0"}, lambda: "/dev/accel0", lambda: FOUR) is None


def test_the_metadata_server_is_not_asked_without_a_tpu() -> None:
    def ask() -> TpuHosts | None:
        raise AssertionError

    assert discover("auto", {}, lambda: None, ask) is None
    assert discover("cpu", {}, lambda: "/dev/accel0", ask) is None


def test_one_host_can_be_chosen_on_a_slice() -> None:
    assert given("0/1", None) == Hosts()


def test_the_address_of_the_metadata_server_can_be_set() -> None:
    assert metadata_url({}) == "http://metadata.google.internal"
    assert metadata_url({"GCE_METADATA_HOST": "127.0.0.1:81"}) == "http://127.0.0.1:81"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "1.5"])
def test_a_wrong_grace_time_is_rejected(value: str) -> None:
    with raises_error("E-HOSTS-033"):
        default_limits({"FORERUN_STOP_SECONDS": value})


def test_the_grace_time_comes_from_the_environment() -> None:
    assert default_limits({}).grace == 30.0
    assert default_limits({"FORERUN_STOP_SECONDS": "540"}).grace == 540.0


def test_the_addresses_of_a_cloud_run_are_the_last_source() -> None:
    """Machines that no TPU names, such as GPU machines, find their own address in the list."""
    listed = {"FORERUN_HOSTS": "203.0.113.1,127.0.0.1,203.0.113.3"}
    assert find_tpu_hosts(listed, lambda name: None) == TpuHosts(1, ("203.0.113.1", "127.0.0.1", "203.0.113.3"))
    named = {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.2,10.0.0.3"}
    assert find_tpu_hosts(listed, named.get) == TpuHosts(0, ("10.0.0.2", "10.0.0.3"))


@pytest.mark.parametrize("names", ["203.0.113.1,203.0.113.2", "127.0.0.1,127.0.0.2"])
def test_no_or_several_own_addresses_are_rejected(names: str) -> None:
    with raises_error("E-HOSTS-029"):
        find_tpu_hosts({"FORERUN_HOSTS": names}, lambda name: None)
