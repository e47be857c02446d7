"""Compilation of a job for the slices and GPU machines of a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from forerun.config.schema import Job
from forerun.errors import StorageError, UserError
from forerun.planner.compile.compiler import verdict
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.installed_compilers import GPU, TPU, InstalledCompiler
from forerun.planner.compile.pool import CompileProgress, answers
from forerun.planner.compile.request import CompileRequest, Impossible
from forerun.planner.compile.result_cache import cached_fit_result
from forerun.planner.hlo import Module
from forerun.planner.report.formatting import places_text
from forerun.planner.search.default_slices import Platform, default_slices, platforms_of
from forerun.reporter import SILENT, LineReporter
from forerun.resolve.resolved_job import ResolvedJob

INSTALLED: dict[Platform, InstalledCompiler] = {"tpu": TPU, "gpu": GPU}


class SliceCompiler:
    """Compiles a job for slices, or takes the results from the cache, and calibrates the times."""

    def __init__(self, *, use_cache: bool, calibrate: Sequence[str], quiet: bool) -> None:
        self.quiet = quiet
        self.reporter = SILENT if quiet else LineReporter(sys.stderr)  # of lines about the work that follows
        self.impossible: list[Impossible] = []
        self.keeps_programs = False  # whether `programs` gets the scheduled programs that are compiled
        self.programs: dict[str, Module] = {}  # by the name of the slice
        self._judge: Callable[..., FitResult] = cached_fit_result if use_cache else verdict
        self._calibration = None
        if calibrate:
            from forerun.planner.time.step_time import calibration

            self._calibration = calibration(list(calibrate))

    def compile(self, requests: Sequence[CompileRequest]) -> list[FitResult]:
        """Return a result for each request, or raise the first error."""
        return self._compiled(requests, self._result)

    def compile_possible(self, requests: Sequence[CompileRequest]) -> list[FitResult]:
        """Return the results. A slice for which the job cannot be built or compiled is added to `impossible`."""

        def tolerant(request: CompileRequest, *rest: Any) -> FitResult | None:
            try:
                return self._result(request, *rest)
            except StorageError:
                raise
            except UserError as error:
                self.impossible.append(Impossible(request.slice, error))
                return None

        return self._compiled(requests, tolerant)

    def _result(self, request: CompileRequest, *rest: Any) -> FitResult:
        result = self._judge(request, *rest)
        if self.keeps_programs and result.module is not None:
            self.programs[request.slice.name] = result.module
        return replace(result, module=None)

    def _compiled(self, requests: Sequence[CompileRequest], judge: Callable[..., FitResult | None]) -> list[FitResult]:
        with CompileProgress(list(requests), plain_lines=not self.quiet) as progress:
            results = answers(requests, progress.phase, judge)
        return [self.calibrated(result) for result in results]

    def scheduled_program(self, result: FitResult) -> Module:
        """Return the scheduled program of a result. The cache has only figures: compile it again if necessary."""
        name = result.question.slice.name
        if name not in self.programs:
            self.reporter.info(f"compiling for {name} again: the cache of plans has no timelines")
            if (module := verdict(result.question).module) is None:
                raise LookupError(f"no program of {name}")
            self.programs[name] = module
        return self.programs[name]

    def calibrated(self, result: FitResult) -> FitResult:
        """Return the result with its times corrected by the user's own runs, if there is a calibration."""
        if self._calibration is None or result.step is None:
            return result
        return replace(result, step=self._calibration.applied(result.step, result.question.slice.chip.name))

    def notes(self) -> list[str]:
        """Return what the table says about the calibration."""
        return [self._calibration.told()] if self._calibration else []


def compare_default_slices(
    resolved: ResolvedJob, compiler: SliceCompiler
) -> tuple[list[FitResult], dict[str, tuple[str, ...]], list[str]]:
    """Compile slices of every generation that may fit, then the next larger ones if these are not enough."""
    platforms, missing = installed_platforms(resolved.job)
    choice = default_slices(resolved, platforms)
    candidates = choice.first()
    places = places_text(one.question.slice for one in candidates)
    compiler.reporter.info(f"comparing {len(candidates)} {places}, then the next larger ones (--on names your own)")
    results = compiler.compile_possible([one.question for one in candidates])
    if more := choice.second(results):
        compiler.reporter.info(f"now {', '.join(one.question.slice.name for one in more)}")
        candidates += more
        results += compiler.compile_possible([one.question for one in more])
    changes = {one.question.slice.name: one.changes for one in candidates if one.changes}
    notes = [f"{name}: laid out with {' '.join(made)}" for name, made in changes.items()]
    return results, changes, [*notes, *choice.notes(candidates), *missing]


def installed_platforms(job: Job) -> tuple[list[Platform], list[str]]:
    """Return the platforms of the job whose compiler is installed, and a note for each that is omitted.

    Raises:
      UserError: The compiler of none of them is installed.
    """
    found: list[Platform] = []
    notes: list[str] = []
    errors: list[UserError] = []
    for platform in platforms_of(job):
        try:
            INSTALLED[platform].require()
            found.append(platform)
        except UserError as error:
            errors.append(error)
            notes.append(f"{platform.upper()}s are not compared: {error.what}. To include them: {error.fix}")
    if not found:
        raise errors[0]
    return found, notes
