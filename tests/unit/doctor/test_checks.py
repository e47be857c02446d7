"""The findings of `forerun doctor` for described machines."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
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
REQUIRES = ("jaxlib<=0.10.2,>=0.10.1", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"')
VERSIONS = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "libtpu": "0.0.42.1",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.8",
    "numpy": "2.4",
}
GPU = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
CPU = DeviceProbe("cpu", "cpu", 8, 1, "auto: no TPU")
V6E_1 = DeviceProbe("tpu", "TPU v6 lite", 1, 1, "auto: tpu with 1 device")
V4_8 = DeviceProbe("tpu", "TPU v4", 4, 1)
ATTACHED = "/dev/accel0"
HELD = Lock("/tmp/libtpu_lockfile", (LockHolder(4711, "python train.py"),), mine=True)
LEFT, LEFT_BY_OTHERS = (Lock("/tmp/libtpu_lockfile", (), mine=mine) for mine in (True, False))
BYTECODE = "/site/jax/__pycache__/__init__.cpython-311.pyc"


def machine(sight: DeviceProbe = CPU, **inputs: Any) -> Machine:
    return Machine(sight=lambda: sight, **{"versions": VERSIONS, "jax_requires": REQUIRES} | inputs)


def installed(attached_tpu: str | None = None, **versions: str | None) -> Machine:
    """Return a machine with other versions of some packages, or without them."""
    merged = VERSIONS | {name.replace("_", "-"): version for name, version in versions.items()}
    present = {name: version for name, version in merged.items() if version}
    return machine(versions=present, attached_tpu=attached_tpu)


def with_variables(**environment: str) -> Machine:
    return machine(environment=environment)


def without_bytecode(**inputs: Any) -> Machine:
    return machine(jax_bytecode=BYTECODE, file_exists=lambda path: path != BYTECODE, **inputs)


def read_only(folder: str) -> str:
    return "Read-only file system"


@pytest.mark.parametrize(
    ("check", "checked", "status", "found", "fix"),
    [
        # ---- packages ----
        (check_python, machine(python=(3, 11, 0)), "ok", "", ""),
        (check_python, machine(python=(3, 10, 14)), "FAIL", "3.10.14", "Python 3.11"),
        (check_jax, machine(), "ok", "", ""),
        (check_jax, installed(jaxlib="0.10.1"), "FAIL", "0.10.1", "pip install 'jax==0.10.2' 'jaxlib==0.10.2'"),
        (check_jax, installed(jaxlib=None), "FAIL", "jaxlib is not installed", install_command()),
        (check_libtpu, machine(), "ok", "", ""),
        (check_libtpu, installed(libtpu="0.0.42"), "FAIL", "0.0.42", "pip install 'libtpu==0.0.42.*'"),
        (check_libtpu, installed(libtpu="0.0.43.1"), "FAIL", "0.0.43.1", "pip install 'libtpu==0.0.42.*'"),
        (check_libtpu, installed(libtpu="0.0.4"), "FAIL", "0.0.4", "pip install 'libtpu==0.0.42.*'"),
        (check_libtpu, installed(libtpu=None), "warn", "", install_command("plan")),
        (check_libtpu, installed(ATTACHED, libtpu=None), "FAIL", ATTACHED, install_command("tpu")),
        (check_libtpu, installed(libtpu_nightly="0.1.dev2024"), "FAIL", "libtpu-nightly", install_command("tpu")),
        (check_gpu_compiler, machine(), "warn", "", install_command("plan-gpu")),
        (check_gpu_compiler, machine(versions=VERSIONS | GPU), "ok", "jax-cuda13-plugin 0.10.2", ""),
        *(
            (check_gpu_compiler, machine(versions=VERSIONS | GPU | {name: "0.9.0"}), "FAIL", "0.9.0", "plan-gpu")
            for name in GPU
        ),
        (
            check_gpu_compiler,
            machine(versions=VERSIONS | GPU, gpu_compiler_failure=lambda: "it ended with code -6: no target"),
            "FAIL",
            "no target",
            install_command("plan-gpu"),
        ),
        (check_libraries, machine(), "ok", "", ""),
        (check_libraries, installed(optax=None), "FAIL", "optax not installed", install_command()),
        (check_torch_xla, machine(), "ok", "", ""),
        (check_torch_xla, installed(torch_xla="2.5.0"), "warn", "2.9.0", "pip uninstall"),
        # ---- environment ----
        (check_platforms, machine(environment={"JAX_PLATFORMS": ""}, attached_tpu=ATTACHED), "ok", "", ""),
        (check_platforms, with_variables(JAX_PLATFORMS="cpu"), "ok", "", ""),
        (check_platforms, machine(environment={"JAX_PLATFORMS": "tpu,cpu"}, attached_tpu=ATTACHED), "ok", "", ""),
        (
            check_platforms,
            machine(environment={"JAX_PLATFORMS": "cpu"}, attached_tpu=ATTACHED),
            "FAIL",
            ATTACHED,
            "unset JAX_PLATFORMS",
        ),
        (check_platforms, with_variables(JAX_PLATFORMS="tpu"), "FAIL", "tpu", "unset JAX_PLATFORMS"),
        (check_torch_xla_variables, machine(), "ok", "", ""),
        (
            check_torch_xla_variables,
            with_variables(PJRT_DEVICE="TPU", TPU_NUM_DEVICES="2"),
            "warn",
            "PJRT_DEVICE=TPU",
            "unset PJRT_DEVICE TPU_NUM_DEVICES; ",
        ),
        (check_debug_variables, machine(), "ok", "", ""),
        (check_debug_variables, with_variables(TF_CPP_MIN_LOG_LEVEL="0", JAX_LOG_COMPILES="1"), "ok", PAGE, ""),
        (check_debug_variables, with_variables(JAX_DEBUG_NANS="1"), "warn", "JAX_DEBUG_NANS", PAGE),
        (
            check_debug_variables,
            with_variables(JAX_DEBUG_NANS="false", JAX_DISABLE_JIT="True"),
            "warn",
            "JAX_DEBUG_NANS=false, JAX_DISABLE_JIT=True",
            "unset JAX_DISABLE_JIT ",
        ),
        (check_debug_variables, with_variables(JAX_DEBUG_NANS="0"), "ok", "JAX_DEBUG_NANS", ""),
        (check_xla_flags, machine(), "ok", "", ""),
        (check_xla_flags, with_variables(XLA_FLAGS="--xla_force_host_platform_device_count=8"), "ok", "", ""),
        (
            check_xla_flags,
            with_variables(
                XLA_FLAGS="--xla_force_host_platform_device_count=8",
                LIBTPU_INIT_ARGS="--xla_tpu_scoped_vmem_limit_kib=98304",
            ),
            "warn",
            "LIBTPU_INIT_ARGS: --xla_tpu_scoped_vmem_limit_kib=98304: ",
            "unset LIBTPU_INIT_ARGS",
        ),
        (check_preload, machine(), "ok", "not set", ""),
        (check_preload, with_variables(LD_PRELOAD="/usr/lib/x.so"), "ok", "/usr/lib/x.so", ""),
        (
            check_preload,
            machine(environment={"LD_PRELOAD": "/usr/lib/x.so"}, file_exists=lambda path: False),
            "warn",
            "/usr/lib/x.so",
            "unset LD_PRELOAD",
        ),
        (check_disk, machine(runs_free_bytes=100 * GIB), "ok", "", ""),
        (check_disk, machine(runs_free_bytes=5 * GIB), "warn", "5.00 GiB", "runs="),
        (check_disk, machine(runs_free_bytes=100 * MIB), "FAIL", "100 MiB", "runs="),
        (check_cache, machine(cache_folder="/c"), "ok", "/c", ""),
        (
            check_cache,
            machine(cache_folder="/c", unwritable=read_only),
            "warn",
            "/c is not writable (Read-only file system)",
            "JAX_COMPILATION_CACHE_DIR",
        ),
        (check_bytecode, machine(jax_bytecode=BYTECODE), "ok", "", ""),
        (check_bytecode, without_bytecode(), "ok", "", ""),
        (
            check_bytecode,
            without_bytecode(environment={"PYTHONDONTWRITEBYTECODE": "1"}),
            "warn",
            "",
            "unset PYTHONDONTWRITEBYTECODE",
        ),
        (
            check_bytecode,
            without_bytecode(unwritable=read_only),
            "warn",
            "/site/jax/__pycache__ is not writable (Read-only file system)",
            "export PYTHONPYCACHEPREFIX=/a/folder/you/may/write",
        ),
        (check_memory, machine(memory_available_bytes=None), "ok", "", ""),
        (check_memory, machine(memory_available_bytes=16 * GIB), "ok", "", ""),
        (check_memory, machine(memory_available_bytes=1 * GIB), "warn", "1.00 GiB", ""),
        (check_shm, machine(shm_bytes=None), "ok", "", ""),
        (check_shm, machine(shm_bytes=8 * GIB), "ok", "", ""),
        (check_shm, machine(shm_bytes=64 * MIB), "warn", "64", "--shm-size"),
        # ---- TPUs ----
        (check_devices, machine(), "ok", "8 x cpu; auto: no TPU", ""),
        (check_devices, machine(DeviceProbe(error="no answer")), "FAIL", "no answer", ""),
        (check_tpu_seen, machine(V6E_1, attached_tpu=ATTACHED), "ok", "", ""),
        (check_tpu_seen, machine(), "ok", "", ""),
        (
            check_tpu_seen,
            machine(attached_tpu=ATTACHED, environment={"JAX_PLATFORMS": "cpu"}),
            "FAIL",
            ATTACHED,
            "unset JAX_PLATFORMS",
        ),
        (check_tpu_seen, machine(attached_tpu=ATTACHED, versions={}), "FAIL", ATTACHED, install_command("tpu")),
        (check_tpu_seen, machine(attached_tpu=ATTACHED, lock=HELD), "FAIL", ATTACHED, "kill 4711"),
        (check_tpu_seen, machine(attached_tpu=ATTACHED), "FAIL", ATTACHED, "restart"),
        (check_device_count, machine(), "ok", "no TPU to count", ""),
        (check_device_count, machine(V6E_1), "ok", "1 on v6e: a v6e chip shows one device", ""),
        (check_device_count, machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v6e-1"}), "ok", "", ""),
        (check_device_count, machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v99-1"}), "ok", "", ""),
        (check_device_count, machine(V4_8, environment={"TPU_ACCELERATOR_TYPE": "v4-8"}), "ok", "", ""),
        (
            check_device_count,
            machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v6e-8"}),
            "FAIL",
            "1 of the 8 devices of v6e-8",
            "",
        ),
        (
            check_device_count,
            machine(V6E_1, environment={"TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_VISIBLE_CHIPS": "0"}),
            "warn",
            "1 of the 8 devices of v6e-8",
            "unset TPU_VISIBLE_CHIPS",
        ),
        (check_lock, machine(), "ok", "", ""),
        (check_lock, machine(lock=HELD), "FAIL", "4711 (python train.py)", "kill 4711"),
        (check_lock, machine(lock=LEFT), "warn", "", "rm /tmp/libtpu_lockfile"),
        (check_lock, machine(lock=LEFT_BY_OTHERS), "warn", "", "sudo rm /tmp/libtpu_lockfile"),
        *((check_hosts, with_variables(TPU_WORKER_HOSTNAMES=name), "ok", "", "") for name in ("", "localhost", "a,")),
        (
            check_hosts,
            with_variables(TPU_WORKER_HOSTNAMES="10.0.0.1,10.0.0.2", TPU_WORKER_ID="1"),
            "warn",
            "host 1 of 2",
            EVERYWHERE,
        ),
        (  # `gcloud ... tpu-vm ssh` sets no variables; the metadata server has the same values
            check_hosts,
            machine(
                metadata={
                    "agent-worker-number": "2",
                    "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2,c:3:10.0.0.3",
                }.get
            ),
            "warn",
            "host 2 of 3",
            EVERYWHERE,
        ),
    ],
)
def test_findings(check: Any, checked: Machine, status: str, found: str, fix: str) -> None:
    finding = check(checked)
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix
    assert status != "ok" or not finding.fix


def test_tpu_expected_from_the_environment() -> None:
    finding = check_tpu_seen(with_variables(TPU_WORKER_ID="0"))
    assert finding.status == "warn"
    assert "TPU_WORKER_ID=0" in finding.found


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


def test_the_pin_is_read_from_the_installed_jax() -> None:
    assert libtpu_pin(REQUIRES) == "0.0.42.*"
    assert libtpu_pin(()) is None
    pin = libtpu_pin(tuple(importlib.metadata.requires("jax") or ()))
    assert pin is not None
    assert pin.startswith("0.0.")


def test_cache_folder() -> None:
    assert cache_folder({"HOME": "/h"}) == "/h/.cache/forerun"
    assert cache_folder({"HOME": "/h", "XDG_CACHE_HOME": "/x"}) == "/x/forerun"
    assert cache_folder({"JAX_COMPILATION_CACHE_DIR": "/j", "HOME": "/h"}) == "/j"


# ---- What the documentation says about findings ----


@pytest.mark.parametrize(("variable", "equivalent"), TORCH_XLA_VARIABLES.items())
def test_each_torch_xla_variable_has_its_equivalent_on_the_page(variable: str, equivalent: str) -> None:
    finding = check_torch_xla_variables(machine(environment={variable: "1"}))
    assert equivalent in finding.fix
    assert finding.fix.endswith(PAGE)
    row = next(line for line in (ROOT / PAGE).read_text("utf-8").splitlines() if line.startswith(f"| `{variable}"))
    assert equivalent.split(" ")[0].rstrip(",").split("=")[0] in row


def test_every_variable_for_debugging_is_on_the_page() -> None:
    text = (ROOT / PAGE).read_text("utf-8")
    assert [name for name in DEBUG_VARIABLES if f"`{name}" not in text] == []


def test_the_recommended_command_starts_each_host_with_its_own_number() -> None:
    """`--worker=all` runs the same words everywhere, so they must name each host through what differs there."""
    command = shlex.split(re.findall(r"--command='([^']+)'", EVERYWHERE)[0])
    options = vars(parser_of(command[1]).read(command[2:]))
    assert (command[0], options["secret"]) == ("forerun", "secret")
    slots = []
    for worker in ("0", "1", "2"):
        environment = {"TPU_WORKER_HOSTNAMES": "tpu-0,tpu-1,tpu-2", "TPU_WORKER_ID": worker}
        hosts = partial(find_tpu_hosts, environment, lambda name: None)
        slots.append(given(options["host"], options.get("leader"), hosts))
    assert [(slot.index, slot.count) for slot in slots] == [(0, 3), (1, 3), (2, 3)]
    assert {slot.address for slot in slots} == {f"tpu-0:{PORT}"}


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
