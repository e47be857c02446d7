"""The outcome of a search: the ranking as text, as JSON and as a job file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.errors import UserError
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.report.formatting import seconds_text
from forerun.planner.report.plan_json import as_json as slices_json
from forerun.planner.search import job_file
from forerun.planner.search.ranking import RankedPlan, equal_slices, ranked
from forerun.planner.search.scoreboard import candidate_counts, print_ranking
from forerun.planner.search.search_ending import SearchEnding
from forerun.planner.search.space import Candidate, Space
from forerun.planner.search.strategy import Goal, Outcome
from forerun.units import GIB, Bytes, Seconds, Usd

Adjust = Callable[[FitResult], FitResult]


@dataclass
class Exploration:
    """The results of a search so far."""

    adjust: Adjust = lambda answer: answer
    verdicts: dict[Candidate, FitResult] = field(default_factory=dict)
    failures: dict[Candidate, str] = field(default_factory=dict)
    recalled: int = 0  # results from the cache
    compiled: int = 0
    interrupted: bool = False

    @property
    def known(self) -> dict[Candidate, Outcome]:
        """The outcomes that the strategy decides on. A failure counts as a candidate that does not fit."""
        outcomes = {
            candidate: Outcome(result.step.mid_seconds if result.step else None, result.memory.peak_bytes)
            for candidate, result in self.verdicts.items()
        }
        return outcomes | {candidate: Outcome(None, None) for candidate in self.failures}


@dataclass(frozen=True)
class SearchOutcome:
    """All that a search found, and how it ended.

    Attributes:
      space: the candidates, and those that were ruled out before compiling.
      found: the compiled results, the failures, and whether Ctrl-C ended the search.
      goal: what the search optimised for.
      tariff: the prices and the budget.
      max_hours: the limit of the time, or None.
      seconds: the time that the search took.
      ending: why the search stopped.
    """

    space: Space
    found: Exploration
    goal: Goal
    tariff: Tariff
    max_hours: float | None
    seconds: Seconds
    ending: SearchEnding

    @cached_property
    def ranking(self) -> list[RankedPlan]:
        """The plans that fit, best first; those within the limits come before the others."""
        return list(ranked(self.found.verdicts, self.goal, self.tariff, self.max_hours))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search early."""
        return self.found.interrupted

    @property
    def has_plan(self) -> bool:
        """Whether a plan fits within the limits."""
        return bool(self.ranking) and self.ranking[0].within

    @property
    def best(self) -> RankedPlan:
        """The best plan. There must be one: see `has_plan`."""
        return self.ranking[0]

    def require_plan(self) -> None:
        """Raise if no plan fits within the limits."""
        if not self.has_plan:
            raise _nothing_found(self.ranking, self.found, self.tariff, self.max_hours)

    def print(self, console: Console) -> None:
        """Print the ranking, how many candidates were compiled, and what the search gained."""
        if self.interrupted:
            console.print(
                f"interrupted after {self.seconds}: these are the plans found so far; run the same command to continue"
            )
        name, counts = self.space.job.name, "\n".join(candidate_counts(self.ending, *self._counts().values()))
        if not self.has_plan:
            if self.ranking:
                print_ranking(console, self.ranking, f"{name}: nothing within the limits")
            console.print(counts)
            return
        ranking, best, goal = self.ranking, self.best, self.goal
        print_ranking(console, ranking, f"{name}: {goal} of {len(ranking)} plans that fit, in {self.seconds}")
        idle = filter(None, [best.verdict.question.idle_text()])
        equal = equal_slices(ranking, goal)
        slice_name = best.candidate.slice.name
        same = [f"Equal to {slice_name} within the error of the times: {', '.join(equal)}."] if equal else []
        console.print("\n".join(["", counts, "", *same, *idle, *_gain(self.space, best, self.found, ranking)]))

    def _counts(self) -> dict[str, Any]:
        found, space = self.found, self.space
        return {
            "candidates": space.size,
            "ruled_out": space.ruled_out,
            "compiled": found.compiled,
            "recalled": found.recalled,
            "too_large": sum(not answer.fits for answer in found.verdicts.values()),
            "failed": found.failures,
            "left": len(space.candidates) - len(found.verdicts) - len(found.failures),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each plan: a row as of `plan --json`, and the values that the search chose."""
        return [self._row(one) for one in self.ranking]

    def _row(self, one: RankedPlan) -> dict[str, Any]:
        [row] = slices_json([one.verdict], self.tariff)["slices"]
        chosen = {"micro_batch": one.candidate.micro_batch, "remat": one.candidate.remat.model_dump()}
        return {**row, **chosen, "on_front": one.on_front, "within_limits": one.within}

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as `plan --search --json` prints it, without the name of the written file."""
        counts = {**self._counts(), "failed": len(self.found.failures)}
        seconds, stopped = round(float(self.seconds), 1), self.ending.to_dict()
        return {"goal": self.goal, "seconds": seconds, **counts, "stopped": stopped, "plans": self.rows()}

    def job_text(self) -> str:
        """Return the best plan as a job file, with the reason of each chosen value as a comment."""
        note = "interrupted before it was finished" if self.interrupted else ""
        written = _as_written(self.space, self.best, self.ranking)
        return job_file.winning_job(self.space.resolved, self.best, self.ranking, self.goal, written, note)

    def write_job(self, path: Path) -> None:
        """Write the best plan as a job file. A file that a search did not write is never replaced."""
        job_file.check_path(path)
        job_file.write(path, self.job_text())


def _as_written(space: Space, best: RankedPlan, ranking: Sequence[RankedPlan]) -> RankedPlan | None:
    own = space.as_written.get(best.candidate.slice.name)
    return next((one for one in ranking if one.candidate == own), None)


def _gain(space: Space, best: RankedPlan, found: Exploration, ranking: Sequence[RankedPlan]) -> list[str]:
    """Return a sentence that compares the best plan with the job's own values on the same slice.

    The list is empty if the job's own values were not compiled.
    """
    name = best.candidate.slice.name
    own = space.as_written.get(name)
    if own == best.candidate:
        return [f"The job as written is the best that was found on {name}."]
    if own is None or own not in found.verdicts:
        return []
    rival, values = _as_written(space, best, ranking), str(own).removeprefix(f"{name} ")
    if rival is None:
        short = Bytes(-found.verdicts[own].spare_bytes)
        return [f"The job as written ({values}) does not fit {name}: {short} short."]
    faster = f"{rival.step_seconds / best.step_seconds:.2f}x as fast"
    return [f"The job as written ({values}): {seconds_text(rival.step_seconds)} a step. The plan found is {faster}."]


def _nothing_found(
    ranking: Sequence[RankedPlan], found: Exploration, tariff: Tariff, max_hours: float | None
) -> UserError:
    """Return the error for a search without a plan that fits the memory and the limits."""
    if not found.verdicts:
        one, text = next(iter(found.failures.items()))
        raise CompilerFailure(f"none of {len(found.failures)} candidates could be compiled; {one}: {text}")
    if not ranking:
        nearest = max(found.verdicts.values(), key=lambda v: v.spare_bytes)
        short = f"the nearest is {nearest.slice_name}, {-nearest.spare_bytes / GIB:.2f} GiB short"
        return UserError(
            "E-PLAN-020",
            f"none of the {len(found.verdicts)} plans that were compiled fits",
            why=f"all of them need more memory than their devices have; {short}",
            fix="allow larger slices: --on 'v5p-*', or choose from: forerun hardware slices",
        )
    cheap = min((one.usd for one in ranking if one.usd is not None), default=None)
    fast = min(one.hours for one in ranking)
    limits = [f"--max-usd {tariff.max_usd:g}"] if tariff.max_usd is not None else []
    limits += [f"--max-hours {max_hours:g}"] if max_hours is not None else []
    return UserError(
        "E-PLAN-021",
        f"no plan stays within {' and '.join(limits)}",
        why=f"the cheapest costs {'an unknown sum' if cheap is None else Usd(cheap)}, the fastest takes {fast:.3g} h",
        fix="raise the limit, train for fewer steps, or allow other slices with --on",
    )
