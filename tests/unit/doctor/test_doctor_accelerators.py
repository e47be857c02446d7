from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.commands import parser_of
from forerun.doctor.accelerators import check_device_count, check_devices, check_hosts, check_lock, check_tpu_seen
from forerun.doctor.device_probe import DeviceProbe
from forerun.doctor.machine import Machine
from forerun.doctor.symptoms import SYMPTOMS
from forerun.hardware.tpu_hosts import find_tpu_hosts
from forerun.hardware.tpu_lock import Lock, LockHolder
from forerun.installation import install_command
from forerun.supervise.host_address import PORT, given

CPU = DeviceProbe("cpu", "cpu", 8, 1, "auto: no TPU")
V6E_1 = DeviceProbe("tpu", "TPU v6 lite", 1, 1, "auto: tpu with 1 device")
HELD = Lock("/tmp/libtpu_lockfile", (LockHolder(4711, "python train.py"),), mine=True)


def machine(sight: DeviceProbe = CPU, **inputs: Any) -> Machine:
    return Machine(sight=lambda: sight, **inputs)


def test_devices() -> None:
    good = check_devices(machine())
    assert (good.status, good.found) == ("ok", "8 x cpu; auto: no TPU")
    bad = check_devices(machine(DeviceProbe(error="no answer from jax within 120 s")))
    assert (bad.status, bad.found) == ("FAIL", "no answer from jax within 120 s")


def test_tpu_in_use_or_none_expected() -> None:
    assert check_tpu_seen(machine(V6E_1, attached_tpu="/dev/accel0")).status == "ok"
    assert check_tpu_seen(machine()).status == "ok"


@pytest.mark.parametrize(
    ("inputs", "fix"),
    [
        ({"environment": {"JAX_PLATFORMS": "cpu"}, "versions": {"libtpu": "1"}}, "unset JAX_PLATFORMS"),
        ({}, install_command("tpu")),
        ({"versions": {"libtpu": "1"}, "lock": HELD}, "kill 4711"),
        ({"versions": {"libtpu": "1"}}, "restart"),
    ],
)
def test_tpu_attached_but_not_seen(inputs: dict[str, Any], fix: str) -> None:
    finding = check_tpu_seen(machine(attached_tpu="/dev/accel0", **inputs))
    assert finding.status == "FAIL"
    assert "/dev/accel0" in finding.found
    assert fix in finding.fix


def test_tpu_expected_from_the_environment() -> None:
    finding = check_tpu_seen(machine(environment={"TPU_WORKER_ID": "0"}))
    assert finding.status == "warn"
    assert "TPU_WORKER_ID=0" in finding.found


def test_one_device_is_right_for_v6e_1() -> None:
    assert check_device_count(machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v6e-1"})).status == "ok"
    unnamed = check_device_count(machine(V6E_1))
    assert (unnamed.status, unnamed.found) == ("ok", "1 on v6e: a v6e chip shows one device")


def test_four_devices_are_right_for_v4_8() -> None:
    seen = DeviceProbe("tpu", "TPU v4", 4, 1)
    assert check_device_count(machine(seen, environment={"TPU_ACCELERATOR_TYPE": "v4-8"})).status == "ok"


def test_one_device_of_eight() -> None:
    environment = {"TPU_ACCELERATOR_TYPE": "v6e-8"}
    finding = check_device_count(machine(V6E_1, environment=environment))
    assert (finding.status, finding.found) == ("FAIL", "1 of the 8 devices of v6e-8")
    limited = check_device_count(machine(V6E_1, environment=environment | {"TPU_VISIBLE_CHIPS": "0"}))
    assert (limited.status, limited.fix) == ("warn", "unset TPU_VISIBLE_CHIPS")


def test_device_count_without_a_tpu_or_with_an_unknown_name() -> None:
    assert check_device_count(machine()).found == "no TPU to count"
    assert check_device_count(machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v99-1"})).status == "ok"


def test_lock() -> None:
    assert check_lock(machine()).status == "ok"
    held = check_lock(machine(lock=HELD))
    assert held.status == "FAIL"
    assert "4711 (python train.py)" in held.found
    assert "kill 4711" in held.fix


def test_lock_left_by_the_dead() -> None:
    mine = check_lock(machine(lock=Lock("/tmp/libtpu_lockfile", (), mine=True)))
    assert (mine.status, mine.fix) == ("warn", "rm /tmp/libtpu_lockfile")
    other = check_lock(machine(lock=Lock("/tmp/libtpu_lockfile", (), mine=False)))
    assert other.fix == "sudo rm /tmp/libtpu_lockfile"


@pytest.mark.parametrize("names", ["", "localhost", "10.0.0.1,"])
def test_one_host(names: str) -> None:
    assert check_hosts(machine(environment={"TPU_WORKER_HOSTNAMES": names})).status == "ok"


def test_several_hosts() -> None:
    environment = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1"}
    finding = check_hosts(machine(environment=environment))
    assert finding.status == "warn"
    assert "host 1 of 2" in finding.found


def test_several_hosts_of_a_tpu_vm_are_known_from_its_metadata() -> None:
    """`gcloud ... tpu-vm ssh` sets no variables; the metadata server has the same values."""
    values = {"agent-worker-number": "2", "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2,c:3:10.0.0.3"}
    finding = check_hosts(machine(metadata=values.get))
    assert (finding.status, "host 2 of 3" in finding.found) == ("warn", True)


def test_the_recommended_command_starts_each_host_with_its_own_number() -> None:
    """`--worker=all` runs the same words everywhere, so they must name each host through what differs there."""
    slots = []
    for worker in ("0", "1", "2"):
        environment = {"TPU_WORKER_HOSTNAMES": "tpu-0,tpu-1,tpu-2", "TPU_WORKER_ID": worker}
        fix = check_hosts(machine(environment=environment)).fix
        (symptom,) = (entry.fix for entry in SYMPTOMS if "--worker=all" in entry.fix)
        for text in (fix, symptom):
            command = shlex.split(re.findall(r"--command='([^']+)'", text)[0])
            options = vars(parser_of(command[1]).read(command[2:]))
            slots.append(
                given(
                    options["host"],
                    options.get("leader"),
                    lambda seen=environment: find_tpu_hosts(seen, lambda name: None),
                )
            )
            assert (command[0], options["secret"]) == ("forerun", "secret")
    assert [(one.index, one.count) for one in slots] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert {one.address for one in slots} == {f"tpu-0:{PORT}"}


def test_no_page_recommends_a_command_for_all_workers_that_numbers_one_host() -> None:
    """Every command behind `--worker=all` in the docs is one that each host can run."""
    pages = [*(Path(__file__).parents[3] / "docs").rglob("*.md"), Path(__file__).parents[3] / "README.md"]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines() if "--worker=all" in line]
    commands = [shlex.split(found) for line in lines for found in re.findall(r"--command='([^']+)'", line)]
    assert commands
    assert {getattr(parser_of(words[1]).read(words[2:]), "host", None) for words in commands} <= {"auto", None}
    assert all("--command='" in line or " scp " in line for line in lines)
