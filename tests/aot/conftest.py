"""What the tests of the compiled program share: the text that `plan` itself reads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import Module, parse
from forerun.resolve.resolved_job import ResolvedJob

ScheduledProgram = Callable[[Job, str], str]


@pytest.fixture
def scheduled_program(monkeypatch: pytest.MonkeyPatch) -> ScheduledProgram:
    """(job, slice) -> the text of the program that the compiler scheduled, as `plan` got it."""
    texts: list[str] = []

    def kept(text: str) -> Module:
        texts.append(text)
        return parse(text)

    monkeypatch.setattr(compiler, "parse", kept)

    def program(job: Job, slice_name: str) -> str:
        answer = compiler.ask(
            CompileRequest(ResolvedJob(job), slice_named(slice_name)), threading.Event(), lambda phase: None
        )
        assert answer.fits
        return texts[-1]

    return program
