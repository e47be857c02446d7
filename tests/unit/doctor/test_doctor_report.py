from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from forerun.doctor import checks
from forerun.doctor.checks import CHECKS, line, run, verdict
from forerun.doctor.child_probe import DeviceProbe, probe_devices
from forerun.doctor.machine import Finding, Machine
from forerun.units import GIB

DOCTOR_PAGE = Path(__file__).parents[3] / "docs/reference/doctor.md"
VERSIONS = dict.fromkeys(("jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "numpy"), "1.0")
VERSIONS |= dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt"), "1.0")


def well(**inputs: object) -> Machine:
    given = {
        "versions": VERSIONS,
        "sight": lambda: DeviceProbe("cpu", "cpu", 8, 1, "auto"),
        "runs_free_bytes": 99 * GIB,
    }
    return Machine(**(given | inputs))  # type: ignore[arg-type]


def test_every_check_is_run() -> None:
    written = {function for name, function in vars(checks).items() if name.startswith("check_")}
    assert set(CHECKS) == written


def test_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(False, well()) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nok  ") + printed.startswith("ok  ") == len(CHECKS)
    assert f"{len(CHECKS)} checks, all passed" in printed


def test_a_failure_is_code_2_and_shows_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(False, well(runs_free_bytes=0)) == 2
    printed = capsys.readouterr().out
    assert "FAIL  disk" in printed
    assert "runs=/path/with/space" in printed
    assert f"{len(CHECKS)} checks: 1 failed, 0 with warnings" in printed


def test_a_warning_is_no_failure() -> None:
    assert run(False, well(runs_free_bytes=5 * GIB)) == 0


@pytest.mark.parametrize(("trial", "free", "code"), [(0, 99 * GIB, 0), (2, 99 * GIB, 2), (0, 0, 2)])
def test_smoke_comes_after(monkeypatch: pytest.MonkeyPatch, trial: int, free: int, code: int) -> None:
    module = types.ModuleType("forerun.doctor.smoke")
    module.run = lambda values: trial  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forerun.doctor.smoke", module)
    monkeypatch.setattr("forerun.doctor.smoke", module, raising=False)
    assert run(True, well(runs_free_bytes=free)) == code


def test_lines() -> None:
    assert line(Finding("disk", "ok", "9 GiB")) == "ok    disk            9 GiB"
    assert line(Finding("disk", "FAIL", "none", "free some")).splitlines()[1].strip() == "fix:            free some"
    assert verdict([Finding("a", "warn", "b")]) == "1 checks: 0 failed, 1 with warnings"


def test_the_documentation_shows_a_real_line() -> None:
    newer = {"jax": "0.10.2", "libtpu": "0.0.51.1"}
    machine = Machine(versions=newer, jax_requires=('libtpu==0.0.42.*; extra == "tpu"',))
    assert line(checks.check_libtpu(machine)) in DOCTOR_PAGE.read_text()


def test_sight_of_this_machine() -> None:
    seen = probe_devices(600)
    assert seen.error is None
    assert (seen.platform, seen.devices, seen.processes) == ("cpu", 8, 1)


def test_sight_that_never_comes() -> None:
    seen = probe_devices(0.2, (sys.executable, "-c", "input()\nwhile True: pass"))
    assert seen.error is not None


def test_sight_that_dies() -> None:
    seen = probe_devices(600, (sys.executable, "-c", "raise SystemExit('libtpu is gone')"))
    assert seen.error == "jax ended with code 1: libtpu is gone"


def test_the_real_machine_can_be_read() -> None:
    here = Machine.here()
    assert here.python == sys.version_info[:3]
    assert here.versions["jax"] == here.versions["jaxlib"]
    assert here.runs_free_bytes > 0
    assert here.unwritable("/proc/nowhere") is not None
