"""forerun's compiler options: compilers accept them, and `plan` reports those that they reject."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import device_kind_of
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.program.compiler_options import compiler_options
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot


def asked(slice_name: str, **values: Any) -> tuple[CompileRequest, compiler.FitResult]:
    """Plan a small job on a slice."""
    content = {
        "model": {"layers": 2, "embed": 256, "heads": 2, "head_dim": 128, "vocab": 512},
        "data": "nothing",
        "sequence": 256,
        "batch": 16,
        "steps": 1,
        **values,
    }
    question = CompileRequest(ResolvedJob(Job.model_validate(content)), slice_named(slice_name))
    return question, compiler.ask(question, threading.Event(), lambda phase: None)


# A mesh with fsdp and tp has the options of all layouts. A generation without options needs no test.
@pytest.mark.parametrize("slice_name", ["v5e-8", "v6e-8"])
def test_the_compiler_accepts_the_options(slice_name: str) -> None:
    question, answer = asked(slice_name, mesh={"tp": 2})
    kind = device_kind_of(question.slice.chip)
    assert kind is not None
    assert len(compiler_options("tpu", kind, question.mesh_shape()).values) >= 3
    assert answer.fits


def test_plan_reports_an_option_that_the_compiler_does_not_know() -> None:
    with pytest.raises(UserError, match="xla_tpu_of_tomorrow") as caught:
        asked("v5e-8", compiler_options={"xla_tpu_of_tomorrow": True})
    assert caught.value.code == "E-COMMAND-097"
