from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.commands import parser_of
from forerun.doctor.checks import (
    DEBUG_VARIABLES,
    PAGE,
    TORCH_XLA_VARIABLES,
    check_bytecode,
    check_cache,
    check_debug_variables,
    check_device_count,
    check_devices,
    check_disk,
    check_gpu_compiler,
    check_hosts,
    check_jax,
    check_libraries,
    check_libtpu,
    check_lock,
    check_memory,
    check_platforms,
    check_preload,
    check_python,
    check_shm,
    check_torch_xla,
    check_torch_xla_variables,
    check_tpu_seen,
    check_xla_flags,
    libtpu_pin,
)
from forerun.doctor.child_probe import COMPILED, DeviceProbe, failure_of_gpu_compiler
from forerun.doctor.machine import Machine, cache_folder
from forerun.hardware.chips import chip_named
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import slice_named
from forerun.hardware.tpu_hosts import EVERYWHERE, find_tpu_hosts
from forerun.hardware.tpu_lock import Lock, LockHolder
from forerun.installation import install_command
from forerun.supervise.host_address import PORT, given
from forerun.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("setting", "attached", "status"),
    [
        ("", "/dev/accel0", "ok"),
        ("cpu", None, "ok"),
        ("tpu,cpu", "/dev/accel0", "ok"),
        ("cpu", "/dev/accel0", "FAIL"),
        ("tpu", None, "FAIL"),
    ],
)
def test_platforms(setting: str, attached: str | None, status: str) -> None:
    finding = check_platforms(Machine(environment={"JAX_PLATFORMS": setting}, attached_tpu=attached))
    assert finding.status == status
    assert (finding.fix == "unset JAX_PLATFORMS") == (status == "FAIL")


def test_torch_xla_variables() -> None:
    assert check_torch_xla_variables(Machine()).status == "ok"
    finding = check_torch_xla_variables(Machine(environment={"PJRT_DEVICE": "TPU", "TPU_NUM_DEVICES": "2"}))
    assert finding.status == "warn"
    assert "PJRT_DEVICE=TPU" in finding.found
    assert finding.fix.startswith("unset PJRT_DEVICE TPU_NUM_DEVICES; ")
    assert "devices=N" in finding.fix


@pytest.mark.parametrize(("variable", "equivalent"), TORCH_XLA_VARIABLES.items())
def test_each_torch_xla_variable_has_its_equivalent_on_the_page(variable: str, equivalent: str) -> None:
    finding = check_torch_xla_variables(Machine(environment={variable: "1"}))
    assert equivalent in finding.fix
    assert finding.fix.endswith(PAGE)
    row = next(line for line in (ROOT / PAGE).read_text("utf-8").splitlines() if line.startswith(f"| `{variable}"))
    assert equivalent.split(" ")[0].rstrip(",").split("=")[0] in row


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"TF_CPP_MIN_LOG_LEVEL": "0", "JAX_LOG_COMPILES": "1"}, "ok"),
        ({"JAX_DEBUG_NANS": "1"}, "warn"),
        ({"JAX_DEBUG_NANS": "false", "JAX_DISABLE_JIT": "True"}, "warn"),
        ({"JAX_DEBUG_NANS": "0"}, "ok"),
    ],
)
def test_variables_for_debugging(environment: dict[str, str], status: str) -> None:
    finding = check_debug_variables(Machine(environment=environment))
    assert finding.status == status
    assert all(name in finding.found for name in environment)
    assert (PAGE in finding.found + finding.fix) == bool(environment)


def test_every_variable_for_debugging_is_on_the_page() -> None:
    text = (ROOT / PAGE).read_text("utf-8")
    assert [name for name in DEBUG_VARIABLES if f"`{name}" not in text] == []


def test_xla_flags() -> None:
    assert check_xla_flags(Machine()).status == "ok"
    virtual = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    assert check_xla_flags(Machine(environment=virtual)).status == "ok"
    changed = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304"}
    finding = check_xla_flags(Machine(environment=virtual | changed))
    assert finding.status == "warn"
    assert "scoped_vmem" in finding.found
    assert "force_host" not in finding.found
    assert finding.fix.startswith("unset LIBTPU_INIT_ARGS")


def test_preload() -> None:
    environment = {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"}
    assert check_preload(Machine()).found == "not set"
    assert check_preload(Machine(environment=environment)).status == "ok"
    gone = check_preload(Machine(environment=environment, file_exists=lambda path: False))
    assert (gone.status, gone.fix) == ("warn", "unset LD_PRELOAD")


@pytest.mark.parametrize(("free", "status"), [(100 * GIB, "ok"), (5 * GIB, "warn"), (100 * MIB, "FAIL")])
def test_disk(free: int, status: str) -> None:
    finding = check_disk(Machine(runs_free_bytes=free))
    assert finding.status == status
    assert ("runs=" in finding.fix) == (status != "ok")


def test_cache() -> None:
    assert check_cache(Machine(cache_folder="/c")).status == "ok"
    finding = check_cache(Machine(cache_folder="/c", unwritable=lambda folder: "Read-only file system"))
    assert (finding.status, finding.found) == ("warn", "/c is not writable (Read-only file system)")


def test_bytecode() -> None:
    file = "/site/jax/__pycache__/__init__.cpython-311.pyc"
    assert check_bytecode(Machine(jax_bytecode=file)).status == "ok"
    fresh = Machine(jax_bytecode=file, file_exists=lambda path: path != file)
    assert check_bytecode(fresh).status == "ok"
    forbidden = check_bytecode(replace(fresh, environment={"PYTHONDONTWRITEBYTECODE": "1"}))
    assert (forbidden.status, forbidden.fix) == ("warn", "unset PYTHONDONTWRITEBYTECODE")
    closed = check_bytecode(replace(fresh, unwritable=lambda folder: "Read-only file system"))
    assert closed.found.startswith("/site/jax/__pycache__ is not writable (Read-only file system)")
    assert (closed.status, closed.fix) == ("warn", "export PYTHONPYCACHEPREFIX=/a/folder/you/may/write")


def test_cache_folder() -> None:
    assert cache_folder({"HOME": "/h"}) == "/h/.cache/forerun"
    assert cache_folder({"HOME": "/h", "XDG_CACHE_HOME": "/x"}) == "/x/forerun"
    assert cache_folder({"JAX_COMPILATION_CACHE_DIR": "/j", "HOME": "/h"}) == "/j"


@pytest.mark.parametrize(("available", "status"), [(None, "ok"), (16 * GIB, "ok"), (1 * GIB, "warn")])
def test_memory(available: int | None, status: str) -> None:
    assert check_memory(Machine(memory_available_bytes=available)).status == status


@pytest.mark.parametrize(("size", "status"), [(None, "ok"), (8 * GIB, "ok"), (64 * MIB, "warn")])
def test_shm(size: int | None, status: str) -> None:
    assert check_shm(Machine(shm_bytes=size)).status == status


REQUIRES = ("jaxlib<=0.10.2,>=0.10.1", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"')
GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1", "optax": "0.2.8", "orbax-checkpoint": "0.12.8"}


def installed(attached_tpu: str | None = None, **versions: str | None) -> Machine:
    merged = GOOD | {"numpy": "2.4"} | {name.replace("_", "-"): version for name, version in versions.items()}
    present = {name: version for name, version in merged.items() if version}
    return Machine(versions=present, jax_requires=REQUIRES, attached_tpu=attached_tpu)


GPU = {"jax_cuda13_plugin": "0.10.2", "jax_cuda13_pjrt": "0.10.2"}


def test_gpu_compiler() -> None:
    missing = check_gpu_compiler(installed())
    assert (missing.status, missing.fix) == ("warn", install_command("plan-gpu"))
    good = check_gpu_compiler(installed(**GPU))
    assert (good.status, good.fix) == ("ok", "")
    assert "jax-cuda13-plugin 0.10.2" in good.found


@pytest.mark.parametrize("changed", [{"jax_cuda13_plugin": "0.9.0"}, {"jax_cuda13_pjrt": "0.9.0"}])
def test_gpu_compiler_of_another_release(changed: dict[str, str]) -> None:
    found = check_gpu_compiler(installed(**(GPU | changed)))
    assert (found.status, found.fix) == ("FAIL", install_command("plan-gpu"))
    assert "0.9.0" in found.found


def test_gpu_compiler_that_fails() -> None:
    broken = replace(installed(**GPU), gpu_compiler_failure=lambda: "it ended with code -6: no target")
    found = check_gpu_compiler(broken)
    assert found.status == "FAIL"
    assert "no target" in found.found
    assert found.fix.endswith(install_command("plan-gpu"))


def test_the_probe_of_the_gpu_compiler_reports_what_its_process_prints() -> None:
    def program(text: str) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", text)

    assert failure_of_gpu_compiler(command=program(f"print({COMPILED!r})")) is None
    failure = failure_of_gpu_compiler(command=program("import sys; sys.exit('no plugin')"))
    assert failure is not None
    assert "no plugin" in failure
    assert "code 1" in failure
    slow = failure_of_gpu_compiler(0.2, program("import time; time.sleep(60)"))
    assert slow is not None
    assert "0.2 s" in slow


def test_python() -> None:
    assert check_python(Machine(python=(3, 11, 0))).status == "ok"
    assert check_python(Machine(python=(3, 10, 14))).status == "FAIL"


def test_jax_and_jaxlib() -> None:
    assert check_jax(installed()).status == "ok"
    differs = check_jax(installed(jaxlib="0.10.1"))
    assert differs.status == "FAIL"
    assert differs.fix == "pip install 'jax==0.10.2' 'jaxlib==0.10.2'"
    assert check_jax(installed(jaxlib=None)).found == "jaxlib is not installed"


def test_the_pin_is_read_from_the_installed_jax() -> None:
    assert libtpu_pin(REQUIRES) == "0.0.42.*"
    assert libtpu_pin(()) is None
    pin = libtpu_pin(tuple(importlib.metadata.requires("jax") or ()))
    assert pin is not None
    assert pin.startswith("0.0.")


@pytest.mark.parametrize("version", ["0.0.42", "0.0.43.1", "0.0.4"])
def test_libtpu_other_than_pinned(version: str) -> None:
    finding = check_libtpu(installed(libtpu=version))
    assert finding.status == "FAIL"
    assert finding.fix == "pip install 'libtpu==0.0.42.*'"


def test_libtpu_as_pinned() -> None:
    assert check_libtpu(installed()).status == "ok"


def test_libtpu_missing() -> None:
    off_the_cloud = check_libtpu(installed(libtpu=None))
    assert (off_the_cloud.status, off_the_cloud.fix) == ("warn", install_command("plan"))
    on_a_tpu = check_libtpu(installed(libtpu=None, attached_tpu="/dev/accel0"))
    assert (on_a_tpu.status, on_a_tpu.fix) == ("FAIL", install_command("tpu"))


def test_libtpu_nightly_next_to_libtpu() -> None:
    assert check_libtpu(installed(libtpu_nightly="0.1.dev2024")).status == "FAIL"


def test_libraries() -> None:
    assert check_libraries(installed()).status == "ok"
    missing = check_libraries(installed(optax=None))
    assert (missing.status, missing.found) == ("FAIL", "optax not installed")


def test_torch_xla() -> None:
    assert check_torch_xla(installed()).status == "ok"
    finding = check_torch_xla(installed(torch_xla="2.5.0"))
    assert finding.status == "warn"
    assert "2.9.0" in finding.found


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
        command = shlex.split(re.findall(r"--command='([^']+)'", fix)[0])
        options = vars(parser_of(command[1]).read(command[2:]))
        seen = partial(find_tpu_hosts, environment, lambda name: None)
        slots.append(given(options["host"], options.get("leader"), seen))
        assert (command[0], options["secret"]) == ("forerun", "secret")
        assert EVERYWHERE in fix
    assert EVERYWHERE in (ROOT / "docs/reference/doctor.md").read_text("utf-8")
    assert [(one.index, one.count) for one in slots] == [(0, 3), (1, 3), (2, 3)]
    assert {one.address for one in slots} == {f"tpu-0:{PORT}"}


def test_no_page_recommends_a_command_for_all_workers_that_numbers_one_host() -> None:
    """Every command behind `--worker=all` in the docs is one that each host can run."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines() if "--worker=all" in line]
    commands = [shlex.split(found) for line in lines for found in re.findall(r"--command='([^']+)'", line)]
    assert commands
    assert {getattr(parser_of(words[1]).read(words[2:]), "host", None) for words in commands} <= {"auto", None}
    assert all("--command='" in line or " scp " in line for line in lines)


def test_figures_of_the_symptoms_are_those_of_the_tables() -> None:
    text = (ROOT / "docs/reference/doctor.md").read_text("utf-8").partition("\n## Symptoms\n")[2]
    for name in ("v6e", "v5e"):
        assert f"{(chip_named(name).usable_bytes or 0) / GIB:.2f}" in text
    v5e, v6e = cheapest("v5e"), cheapest("v6e")
    assert v5e is not None
    assert v6e is not None
    assert f"8 x {v5e.usd_per_chip_hour_on_demand:.2f} = {8 * v5e.usd_per_chip_hour_on_demand:.2f}" in text
    assert f"v6e-1 is {v6e.usd_per_chip_hour_on_demand:.2f} and v6e-8 {8 * v6e.usd_per_chip_hour_on_demand:.2f}" in text
    assert (slice_named("v6e-1").devices, slice_named("v4-8").devices, slice_named("v3-8").devices) == (1, 4, 8)
