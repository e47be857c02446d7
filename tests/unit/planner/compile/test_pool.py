"""Several slices at once: answers in order; a failure or Ctrl-C ends the compilers that still run."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from forerun.config.schema import Job
from forerun.planner.compile import pool as module
from forerun.planner.compile.pool import CompileProgress, answers
from forerun.planner.compile.request import CompileRequest, slices_named
from forerun.resolve.resolved_job import ResolvedJob

PATIENCE_SECONDS = 120  # only a hang takes so long


class Judge:
    """Answers a number with its square, or waits to be stopped (`wait`), or fails (`fail`)."""

    def __init__(self) -> None:
        self.stopped: list[bool] = []

    def __call__(self, question: Any, stop: threading.Event, on_phase: Any) -> Any:
        on_phase("lower")
        if question == "wait":
            self.stopped.append(stop.wait(PATIENCE_SECONDS))
            raise RuntimeError("stopped")
        if question == "fail":
            raise ValueError("no such chip")
        return Verdict(question * question)


class Verdict(int):
    fits = True


class CtrlC(list[Any]):
    """Pressed when the last question is about to be asked."""

    def __iter__(self) -> Iterator[Any]:
        yield from list.__iter__(self)
        raise KeyboardInterrupt


def test_in_the_order_of_the_questions() -> None:
    heard: list[tuple[Any, str]] = []
    found = answers([3, 1, 2], lambda question, phase: heard.append((question, phase)), Judge())  # type: ignore[list-item, arg-type]
    assert found == [9, 1, 4]
    assert set(heard) == {(number, phase) for number in (1, 2, 3) for phase in ("lower", "fits")}


def test_a_failure_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # side by side, on a machine of one core too
    judge = Judge()
    with pytest.raises(ValueError, match="no such chip"):
        answers(["wait", "fail"], judge=judge)  # type: ignore[list-item, arg-type]
    assert judge.stopped == [True]


def test_ctrl_c_between_two_questions_stops_the_first() -> None:
    judge = Judge()
    with pytest.raises(KeyboardInterrupt):
        answers(CtrlC(["wait", "wait"]), judge=judge)
    assert set(judge.stopped) <= {True}


# What is shown while compilers run: lines in a file, a live picture on a terminal.

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
