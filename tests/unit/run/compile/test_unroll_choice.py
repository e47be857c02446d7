"""`train` takes the value of `unroll: auto` that `plan` finds for the slice of its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recording_reporter import RecordingReporter

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.devices import DeviceChoice
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.unrolling import UnrollChoice
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.compile import unroll_choice
from forerun.run.compile.unroll_choice import with_unroll_chosen

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

    monkeypatch.setattr(unroll_choice, "cached_fit_result", planned)
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
    monkeypatch.setattr(unroll_choice, "cached_fit_result", planned)
    with_unroll_chosen(job(unroll="auto", devices=4), DeviceChoice("tpu", TPU[:4], ""))
    assert (asked[0].slice.name, asked[0].devices) == ("v5e-8", 4)


def test_a_compiler_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(question: CompileRequest) -> Any:
        raise UserError("E-PLAN-004", "the TPU compiler is not installed", why="", fix="")

    monkeypatch.setattr(unroll_choice, "cached_fit_result", planned)
    told: list[str] = []
    assert (
        with_unroll_chosen(job(unroll="auto"), DeviceChoice("tpu", TPU, ""), RecordingReporter(told)).job.unroll
        is False
    )
    assert "the TPU compiler is not installed" in told[0]


@pytest.mark.parametrize("unroll", [True, False])
def test_a_fixed_value_is_kept(unroll: bool) -> None:
    told: list[str] = []
    assert (
        with_unroll_chosen(job(unroll=unroll), DeviceChoice("tpu", TPU, ""), RecordingReporter(told)).job.unroll
        is unroll
    )
    assert not told
