"""`train` takes the value of `unroll: auto` that `plan` finds for the slice of its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recording_reporter import RecordingReporter

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.devices import DeviceChoice
from forerun.planner.compile.fit_result import UnrollChoice
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run import run_devices
from forerun.run.run_devices import attention_note, with_unroll_chosen

TPU = tuple(
    SimpleNamespace(device_kind="TPU v5 lite", platform="tpu", coords=(x, y, 0), process_index=0)
    for y in range(4)
    for x in range(2)
)


def job(**values: Any) -> ResolvedJob:
    model = {"layers": 2, "embed": 64, "heads": 2, "vocab": 256}
    return ResolvedJob(Job.model_validate({"model": model, "data": "nothing", "steps": 1, "batch": 8, **values}))


@pytest.mark.parametrize("unrolled", [True, False])
def test_the_choice_of_plan(monkeypatch: pytest.MonkeyPatch, unrolled: bool) -> None:
    asked: list[CompileRequest] = []

    def planned(question: CompileRequest) -> Any:
        asked.append(question)
        return SimpleNamespace(unroll=UnrollChoice(unrolled, "it was compiled"))

    monkeypatch.setattr(run_devices, "cached_fit_result", planned)
    told: list[str] = []
    found = with_unroll_chosen(job(unroll="auto"), DeviceChoice("tpu", TPU, ""), RecordingReporter(told))
    assert found.job.unroll is unrolled
    assert told == [f"unroll (auto): {str(unrolled).lower()}, because it was compiled"]
    assert (asked[0].slice.name, asked[0].job.unroll) == ("v5e-8", "auto")


def test_a_part_of_a_slice_is_planned_as_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CompileRequest] = []

    def planned(question: CompileRequest) -> Any:
        asked.append(question)
        return SimpleNamespace(unroll=UnrollChoice(True, ""))

    monkeypatch.setattr("jax.devices", lambda platform: list(TPU))
    monkeypatch.setattr(run_devices, "cached_fit_result", planned)
    with_unroll_chosen(job(unroll="auto", devices=4), DeviceChoice("tpu", TPU[:4], ""))
    assert (asked[0].slice.name, asked[0].devices) == ("v5e-8", 4)


def test_a_compiler_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(question: CompileRequest) -> Any:
        raise UserError("E-PLAN-004", "the TPU compiler is not installed", why="", fix="")

    monkeypatch.setattr(run_devices, "cached_fit_result", planned)
    told: list[str] = []
    assert (
        with_unroll_chosen(job(unroll="auto"), DeviceChoice("tpu", TPU, ""), RecordingReporter(told)).job.unroll
        is False
    )
    assert "the TPU compiler" in told[0]


@pytest.mark.parametrize("unroll", [True, False])
def test_a_fixed_value_is_kept(unroll: bool) -> None:
    told: list[str] = []
    assert (
        with_unroll_chosen(job(unroll=unroll), DeviceChoice("tpu", TPU, ""), RecordingReporter(told)).job.unroll
        is unroll
    )
    assert not told


def _line(kind: str, platform: str, capability: str | None, **job: Any) -> str | None:
    model = {"layers": 2, "embed": 64, "heads": 2, "vocab": 128}
    made = Job.model_validate({"model": model, "data": "nothing", "sequence": 64, "batch": 1, "steps": 1, **job})
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    return attention_note(ResolvedJob(made), SimpleNamespace(devices=[device]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "capability", "expected"),
    [("NVIDIA H20", "9.0", "attention: cudnn"), ("NVIDIA A10G", "8.6", "attention: xla, because ")],
)
def test_a_gpu_of_no_table_has_a_kernel_by_its_capability(kind: str, capability: str, expected: str) -> None:
    line = _line(kind, "gpu", capability)
    assert line is not None
    assert line.startswith(expected)
    assert ("because" in line) == expected.endswith("because ")


def test_a_named_kernel_has_no_reason() -> None:
    assert _line("NVIDIA H20", "gpu", "9.0", attention="xla") == "attention: xla"


def test_other_devices_have_no_line() -> None:
    assert _line("TPU v5 lite", "tpu", None) is None


def test_a_split_sequence_that_splash_cannot_compute_has_a_reason() -> None:
    line = _line("TPU v5 lite", "tpu", None, mesh={"context": 2}, sequence=320)
    assert line is not None
    assert line.startswith("attention: xla, because ")
    assert "80" in line, "the length of a chunk"
    assert _line("TPU v5 lite", "tpu", None, mesh={"context": 2}, sequence=512) is None
