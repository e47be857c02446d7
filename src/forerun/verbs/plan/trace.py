"""The trace of a plan: the simulated timeline of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.errors import UserError
from forerun.files import write_output
from forerun.planner.compile.fit_result import FitResult, verdict
from forerun.planner.hlo import Module
from forerun.planner.trace.chrome_trace import SimulatedStep, encoded, trace_content
from forerun.planner.trace.request import require_one_slice
from forerun.reporter import Reporter
from forerun.version import __version__


def save_trace(
    results: Sequence[FitResult],
    programs: dict[str, Module],
    file: Path,
    on: str | None,
    reporter: Reporter,
) -> None:
    """Write the simulated timeline of one result to a file. See `Plan.save_trace`.

    Args:
      results: the results of a plan.
      programs: scheduled programs by slice. A program that is not there is compiled and added.
      file: the file to write.
      on: the slice, or None for the only one.
      reporter: receives a message if the program is compiled again.
    """
    name = require_one_slice([result.question.slice.name for result in results], on)
    result = next(one for one in results if one.question.slice.name == name)
    if result.step is None:
        raise UserError(
            "E-PLAN-026",
            f"{name}: there is no timeline, because the job does not fit",
            why="the compiler schedules only programs that fit the memory of a device",
            fix="choose a larger slice, or change the job as `forerun plan` suggests",
        )
    job = result.question.job
    simulated = SimulatedStep(
        module=_program(result, programs, reporter),
        slice=result.question.slice,
        step=result.step,
        facts={
            "job": job.name,
            "model": str(job.model.name or "free dimensions"),
            "slice": name,
            "mesh": result.mesh,
            "tokens_per_step": result.tokens_per_step,
            "program": result.program,
            "forerun": __version__,
        },
    )
    content = encoded(trace_content(simulated), compress=file.suffix == ".gz")
    write_output(file, content, fix="name another file with --trace")


def _program(result: FitResult, programs: dict[str, Module], reporter: Reporter) -> Module:
    """Return the scheduled program of a result. The cache has only figures: compile it again if necessary."""
    name = result.question.slice.name
    if name not in programs:
        reporter.info(f"compiling for {name} again: the cache of plans has no timelines")
        verdict(result.question, keep=lambda module: programs.update({name: module}))
    return programs[name]
