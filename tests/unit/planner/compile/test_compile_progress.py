"""What is shown while compilers run: lines in a file, a live picture on a terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from forerun.config.schema import Job
from forerun.planner.compile import compile_progress as module
from forerun.planner.compile.compile_progress import CompileProgress
from forerun.planner.compile.request import CompileRequest, slices_named
from forerun.resolve.resolved_job import ResolvedJob

JOB = ResolvedJob(Job.model_validate({"model": "qwen3-0.6b", "data": "nothing", "steps": 5}))
FIRST, SECOND, THIRD = (CompileRequest(JOB, one) for one in slices_named(["v6e-1", "v5e-8", "v5p-8"]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for the progress, in seconds; it stands still unless it is moved on."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))
    return now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines(clock: list[float]) -> None:
    out = io.StringIO()
    with CompileProgress([FIRST, SECOND], out) as progress:
        progress.phase(FIRST, "lower")
        clock[0] += 2.5
        progress.phase(FIRST, "compile")
        clock[0] += 10
        progress.phase(FIRST, "too large")
    assert out.getvalue() == "v6e-1: lowering\nv6e-1: compiling\nv6e-1: too large after 12.5 s\n"


def test_no_lines_when_a_program_reads() -> None:
    out = io.StringIO()
    with CompileProgress([FIRST], out, plain_lines=False) as progress:
        progress.phase(FIRST, "fits")
    assert out.getvalue() == ""


def test_every_slice_has_a_line(clock: list[float]) -> None:
    progress = CompileProgress([FIRST, SECOND, THIRD], io.StringIO(), plain_lines=False)
    progress.phase(FIRST, "fits")
    progress.phase(SECOND, "compile")
    clock[0] += 7
    shown = io.StringIO()
    Console(file=shown, width=80).print(progress.screen())
    words = [line.split() for line in shown.getvalue().splitlines()]
    assert words[0] == ["✓", "v6e-1", "fits", "0", "s"]
    assert words[1][1:] == ["v5e-8", "compiling", "7", "s"]
    assert words[2] == ["·", "v5p-8", "waiting"]


def test_terminal_is_left_clean(monkeypatch: object) -> None:
    out = Terminal()
    with CompileProgress([FIRST], out) as progress:
        progress.phase(FIRST, "fits")
    assert "v6e-1: fits" not in out.getvalue(), "plain lines belong into files"
