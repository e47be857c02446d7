from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.doctor.environment_checks import (
    DEBUG_VARIABLES,
    PAGE,
    TORCH_XLA_VARIABLES,
    check_bytecode,
    check_cache,
    check_debug_variables,
    check_disk,
    check_memory,
    check_platforms,
    check_preload,
    check_shm,
    check_torch_xla_variables,
    check_xla_flags,
)
from forerun.doctor.machine import Machine, cache_folder
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
