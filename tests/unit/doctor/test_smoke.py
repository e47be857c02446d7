"""`doctor --smoke` for real, on the virtual devices; and a line that fails says so and ends it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from error_assertions import assert_error

from forerun.checkpoint.store import CheckpointStore
from forerun.cli.main import main
from forerun.config.schema import Job
from forerun.doctor import checks, smoke
from forerun.doctor.machine import Machine
from forerun.errors import UserError


@pytest.fixture(autouse=True)
def _a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps with few tokens each: programs here are compiled without optimizations, so steps are slow."""
    full_size = smoke.smoke_job

    def small_job(folder: Path, devices: int) -> Job:
        return full_size(folder, devices).model_copy(update={"sequence": 32, "batch": devices})

    monkeypatch.setattr(smoke, "TRAIN_SECONDS", 0.0)
    monkeypatch.setattr(smoke, "smoke_job", small_job)


def test_every_line_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok    ") for line in lines)
    assert f"{len(jax.devices())} x cpu" in lines[0]
    assert "equal bit for bit" in lines[5]


def test_a_checkpoint_that_lies_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CheckpointStore.restore

    def lying(self: CheckpointStore, step: int, like: object) -> object:
        return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), honest(self, step, like))

    monkeypatch.setattr(CheckpointStore, "restore", lying)
    assert smoke.run() == 2
    failed, *remedies = capsys.readouterr().out.splitlines()[-3:]
    assert failed == "FAIL  checkpoint saved and read back: the checkpoint differs after it was read back"
    assert remedies == ["      why: arrays differ", "      fix: check the disk"]


def test_devices_and_mesh_are_those_of_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    values = smoke.values_of(["device=cpu", "devices=4", "mesh={data: 2, fsdp: 1, tp: 2}"])
    assert smoke.run(values) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 x cpu" in lines[0]
    assert "4 of 8" in lines[0]
    assert "on one device" in lines[3]
    assert lines[3].endswith("s)")


def test_an_absent_device_fails_with_cause_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests set JAX_PLATFORMS=cpu, which excludes a TPU on any machine."""
    assert smoke.run(smoke.values_of(["device=tpu"])) == 2
    failed, *rest = capsys.readouterr().out.splitlines()
    assert failed.startswith("FAIL  device: ")
    assert any("JAX_PLATFORMS" in line for line in rest)
    assert any(line.startswith("      fix: ") for line in rest)


def test_the_command_reports_the_absent_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS", ())
    monkeypatch.setattr(Machine, "here", staticmethod(Machine))
    assert main(["doctor", "--smoke", "device=tpu"]) == 2
    assert "FAIL  device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("smokes", "override", "code"),
    [
        (False, "device=tpu", "E-COMMAND-060"),
        (True, "batch=4", "E-COMMAND-061"),
        (True, "device", "E-JOB-002"),
        (True, "mesh.data=two", "E-JOB-020"),
    ],
)
def test_other_overrides_are_errors(smokes: bool, override: str, code: str) -> None:
    with pytest.raises(UserError) as caught:
        checks.run(smokes, Machine(), [override])
    assert_error(caught.value, code)
