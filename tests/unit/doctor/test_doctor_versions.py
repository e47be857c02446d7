from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import replace

import pytest

from forerun.doctor.compiler_probe import PASSED, failure_of_gpu_compiler
from forerun.doctor.machine import Machine
from forerun.doctor.versions import (
    check_gpu_compiler,
    check_jax,
    check_libraries,
    check_libtpu,
    check_python,
    check_torch_xla,
    libtpu_pin,
)
from forerun.installation import install_command

REQUIRES = ("jaxlib<=0.10.2,>=0.10.1", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"')
GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1", "optax": "0.2.8", "orbax-checkpoint": "0.12.8"}


def machine(attached_tpu: str | None = None, **versions: str | None) -> Machine:
    merged = GOOD | {"numpy": "2.4"} | {name.replace("_", "-"): version for name, version in versions.items()}
    present = {name: version for name, version in merged.items() if version}
    return Machine(versions=present, jax_requires=REQUIRES, attached_tpu=attached_tpu)


GPU = {"jax_cuda13_plugin": "0.10.2", "jax_cuda13_pjrt": "0.10.2"}


def test_gpu_compiler() -> None:
    missing = check_gpu_compiler(machine())
    assert (missing.status, missing.fix) == ("warn", install_command("plan-gpu"))
    good = check_gpu_compiler(machine(**GPU))
    assert (good.status, good.fix) == ("ok", "")
    assert "jax-cuda13-plugin 0.10.2" in good.found


@pytest.mark.parametrize("changed", [{"jax_cuda13_plugin": "0.9.0"}, {"jax_cuda13_pjrt": "0.9.0"}])
def test_gpu_compiler_of_another_release(changed: dict[str, str]) -> None:
    found = check_gpu_compiler(machine(**(GPU | changed)))
    assert (found.status, found.fix) == ("FAIL", install_command("plan-gpu"))
    assert "0.9.0" in found.found


def test_gpu_compiler_that_fails() -> None:
    broken = replace(machine(**GPU), gpu_compiler_failure=lambda: "it ended with code -6: no target")
    found = check_gpu_compiler(broken)
    assert found.status == "FAIL"
    assert "no target" in found.found
    assert found.fix.endswith(install_command("plan-gpu"))


def test_the_probe_of_the_gpu_compiler_reports_what_its_process_prints() -> None:
    def program(text: str) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", text)

    assert failure_of_gpu_compiler(command=program(f"print({PASSED!r})")) is None
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
    assert check_jax(machine()).status == "ok"
    differs = check_jax(machine(jaxlib="0.10.1"))
    assert differs.status == "FAIL"
    assert differs.fix == "pip install 'jax==0.10.2' 'jaxlib==0.10.2'"
    assert check_jax(machine(jaxlib=None)).found == "jaxlib is not installed"


def test_the_pin_is_read_from_the_installed_jax() -> None:
    assert libtpu_pin(REQUIRES) == "0.0.42.*"
    assert libtpu_pin(()) is None
    pin = libtpu_pin(tuple(importlib.metadata.requires("jax") or ()))
    assert pin is not None
    assert pin.startswith("0.0.")


@pytest.mark.parametrize("version", ["0.0.42", "0.0.43.1", "0.0.4"])
def test_libtpu_other_than_pinned(version: str) -> None:
    finding = check_libtpu(machine(libtpu=version))
    assert finding.status == "FAIL"
    assert finding.fix == "pip install 'libtpu==0.0.42.*'"


def test_libtpu_as_pinned() -> None:
    assert check_libtpu(machine()).status == "ok"


def test_libtpu_missing() -> None:
    off_the_cloud = check_libtpu(machine(libtpu=None))
    assert (off_the_cloud.status, off_the_cloud.fix) == ("warn", install_command("plan"))
    on_a_tpu = check_libtpu(machine(libtpu=None, attached_tpu="/dev/accel0"))
    assert (on_a_tpu.status, on_a_tpu.fix) == ("FAIL", install_command("tpu"))


def test_libtpu_nightly_next_to_libtpu() -> None:
    assert check_libtpu(machine(libtpu_nightly="0.1.dev2024")).status == "FAIL"


def test_libraries() -> None:
    assert check_libraries(machine()).status == "ok"
    missing = check_libraries(machine(optax=None))
    assert (missing.status, missing.found) == ("FAIL", "optax not installed")


def test_torch_xla() -> None:
    assert check_torch_xla(machine()).status == "ok"
    finding = check_torch_xla(machine(torch_xla="2.5.0"))
    assert finding.status == "warn"
    assert "2.9.0" in finding.found
