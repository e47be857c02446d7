"""The decision of `unroll: auto`: compile the step with and without a loop over the layers, and compare.

`plan` and `train` call the same function with the same compiler. So they choose the same program for the same job,
devices and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from forerun.models.model_facts import ModelFacts
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import Module
from forerun.units import Bytes, Seconds

# The compile time of a program without a loop grows with the number of layers, and a wide layer hides the traffic of
# the loop behind its matmuls. Above these limits, nothing is compiled for the decision.
MOST_LAYERS, MOST_WIDTH = 40, 2048
MARGIN = 0.05  # share of the usable memory that must stay free: samples and validation need memory beside the step
GAIN = 0.02  # by which the step must be shorter, because the program without a loop takes longer to compile

Keep = Callable[[Module], None]
# Results are of type FitResult. Its module imports this one, so it cannot be named here.
Judge = Callable[[CompileRequest, Keep], Any]


@dataclass(frozen=True)
class UnrollChoice:
    """The value that `unroll: auto` got, and why."""

    unrolled: bool
    reason: str


def is_open(question: CompileRequest) -> bool:
    """Return whether the decision is still to be made. The teacher's forward pass of `forerun cache` has a loop."""
    return question.job.unroll == "auto" and not question.recording


def with_value(question: CompileRequest, unrolled: bool) -> CompileRequest:
    """Return the request with `unroll` set to a value."""
    return replace(question, resolved=question.resolved.with_values(unroll=unrolled))


def decided(question: CompileRequest, judge: Judge, keep: Keep = lambda module: None) -> Any:
    """Return the FitResult of the better program of a request with `unroll: auto`.

    Args:
        question: The request.
        judge: Compiles a request with a fixed value. Its second argument receives the scheduled program.
        keep: Receives the scheduled program of the better one, if it was compiled now and fits.
    """
    kept: dict[bool, Module] = {}

    def compiled(unrolled: bool) -> Any:
        return judge(with_value(question, unrolled), lambda module: kept.update({unrolled: module}))

    looped = compiled(False)
    obstacle = implausible(question)
    if obstacle is not None:
        best, choice = looped, UnrollChoice(False, obstacle)
    else:
        straight = compiled(True)
        choice = compared(looped, straight)
        seconds = Seconds(looped.compile_seconds + straight.compile_seconds)
        best = replace(straight if choice.unrolled else looped, compile_seconds=seconds)
    if choice.unrolled in kept:
        keep(kept[choice.unrolled])
    return replace(best, question=question, unroll=choice)


def implausible(question: CompileRequest) -> str | None:
    """Return why a program without a loop is not worth a compilation, or None if it is."""
    models = [("the model", question.resolved.model_facts)]
    if question.resolved.step_teacher is not None:  # the teacher's layers run in the same way
        models.append(("the teacher", question.resolved.step_teacher))
    return next((text for name, facts in models if (text := _too_large(name, facts)) is not None), None)


def _too_large(name: str, facts: ModelFacts) -> str | None:
    config = facts.config
    if config is None:
        return f"{name} is a custom class, so the number of its layers is unknown"
    if config.layers > MOST_LAYERS:
        return f"{name} has {config.layers} layers, auto unrolls at most {MOST_LAYERS}"
    if config.embed > MOST_WIDTH:
        return f"{name} is {config.embed} wide, auto unrolls models up to {MOST_WIDTH}"
    return None


def compared(looped: Any, straight: Any) -> UnrollChoice:
    """Return the choice between the FitResult of the program with a loop and that of the one without."""
    limit = Bytes(int(straight.limit_bytes * (1 - MARGIN)))
    peak = straight.memory.peak_bytes
    if not straight.fits or straight.step is None or peak > limit:
        return UnrollChoice(False, f"without a loop the step needs {peak}, and auto allows {limit}")
    if looped.step is None:
        return UnrollChoice(True, f"it needs {peak}, and with a loop the step does not fit")
    before, after = looped.step.mid_seconds, straight.step.mid_seconds
    times = f"{after:.4g} s without a loop, {before:.4g} s with it"
    if after > before * (1 - GAIN):
        return UnrollChoice(False, f"the predicted step is not {GAIN:.0%} shorter: {times}")
    return UnrollChoice(True, f"the predicted step is {times}; it needs {peak} of {straight.limit_bytes}")
