"""Several slices at once: answers in order; a failure or Ctrl-C ends the compilers that still run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.planner.compile.pool import answers

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
