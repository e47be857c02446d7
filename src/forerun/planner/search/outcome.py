"""The outcome of a search: why it stopped, and the ranking as text, as JSON and as a job file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.errors import UserError
from forerun.hardware.prices import GOOGLE_CLOUD
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.report.formatting import gib_text, hours_text, rate_text, seconds_text
from forerun.planner.report.plan_json import as_json as slices_json
from forerun.planner.report.table import print_widest
from forerun.planner.search import job_file
from forerun.planner.search.ranking import RankedPlan, equal_slices, ranked, shown
from forerun.planner.search.regression import Estimate
from forerun.planner.search.space import Candidate, Space, remat_text
from forerun.planner.search.strategy import Goal, Known, Outcome, Rejection, Strategy
from forerun.units import GIB, Bytes, Seconds, Usd

Adjust = Callable[[FitResult], FitResult]
Cause = Literal["all compiled", "bound", "prediction", "limit", "interrupted"]
ROWS = 12  # of the ranking that is printed
DROPPED_WHEN_NARROW = ("tokens/s\nper chip", "peak\nGiB", "acc", "hours")


@dataclass(frozen=True)
class SearchEnding:
    """The reason why a search stopped.

    Attributes:
      cause: `all compiled`: no candidate is left. `bound`: it is proven that none of the others can win. `prediction`:
        none of the others is expected to win. `limit`: the largest number of compiles was reached. `interrupted`: the
        user pressed Ctrl-C.
      rejections: the number of candidates that were not compiled, by reason.
      open_count: the number of candidates that were not compiled although they may win.
      nearest: the predicted step of the nearest candidate on the slice of the best plan, relative to the best step;
        None if no candidate there was rejected by its predicted time.
    """

    cause: Cause
    rejections: Counter[Rejection]
    open_count: int = 0
    nearest: Estimate | None = None

    def text(self) -> str:
        """Return the reason as a phrase."""
        left = self.rejections.total() + self.open_count
        if self.cause == "all compiled":
            return "all candidates that may fit are compiled"
        if self.cause == "interrupted":
            return f"interrupted; {self.open_count} of the {left} candidates left may be better"
        if self.cause == "limit":
            return f"the limit of compiles is reached; {self.open_count} of the {left} candidates left may be better"
        if self.cause == "bound":
            return f"none of the {left} candidates left can win (bound)"
        if self.nearest is None:
            return f"none of the {left} candidates left is expected to win (a prediction, no proof)"
        larger = " or too large" if self.rejections[Rejection.MEMORY_PREDICTION] else ""
        distance = f"the {left} candidates left are predicted to be {_slower(self.nearest)}{larger}"
        return f"{distance} (a prediction, no proof; --search-all compiles them)"

    def reason_counts(self) -> list[tuple[str, int]]:
        """Return why candidates were not compiled, with their numbers, most frequent first."""
        counts = [(reason.value, count) for reason, count in self.rejections.most_common()]
        return counts + ([("may be better, but the search was stopped", self.open_count)] if self.open_count else [])

    def to_dict(self) -> dict[str, Any]:
        """Return the reason for JSON."""
        nearest = self.nearest
        return {
            "by": self.cause,
            "text": self.text(),
            "not_compiled": dict(self.reason_counts()),
            "nearest_slower_by": None if nearest is None else round(nearest.mid - 1, 4),
            "nearest_error": None if nearest is None else round(nearest.deviation, 4),
        }


def _slower(nearest: Estimate) -> str:
    """Return how much slower the nearest candidate is, with its error."""
    percent, error = 100 * (nearest.mid - 1), 100 * nearest.deviation
    if percent < 0.5:
        return f"not better than the best plan by more than 1 % (the nearest: {percent:+.1f} % ± {error:.1f} %)"
    return f"slower by at least {percent:.0f} % (± {error:.0f} %)"


def ending_of(strategy: Strategy, known: Known, *, interrupted: bool) -> SearchEnding:
    """Return why a search with these results stopped."""
    left = [one for one in strategy.space.candidates if one not in known]
    if not left:
        return SearchEnding("all compiled", Counter())
    reasons = strategy.rejected(known)
    wanted = {one for one in strategy.proposals(known) if one not in known}
    rejections = Counter(reasons[one] for one in left if one in reasons and one not in wanted)
    open_count = len(left) - rejections.total()
    if interrupted or open_count:
        return SearchEnding("interrupted" if interrupted else "limit", rejections, open_count)
    cause: Cause = "bound" if all(reason.is_proof for reason in rejections) else "prediction"
    return SearchEnding(cause, rejections, nearest=strategy.nearest(known))


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
        name, counts = self.space.job.name, "\n".join(self._count_lines())
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
            "failed": len(found.failures),
            "left": len(space.candidates) - len(found.verdicts) - len(found.failures),
        }

    def _count_lines(self) -> list[str]:
        """Return lines that account for every candidate of the space: compiled, ruled out, failed, or not compiled.

        The last line is the reason why the search stopped.
        """
        counts, ruled_out, failures = self._counts(), self.space.ruled_out, self.found.failures
        recalled = f", {counts['recalled']} from the cache" if counts["recalled"] else ""
        lines = [
            f"{counts['candidates']} candidates: {counts['compiled']} compiled{recalled} ({counts['too_large']} of "
            f"them do not fit), {ruled_out.total()} ruled out by formula"
        ]
        lines += [f"  {count:>5}  {reason}" for reason, count in ruled_out.most_common()]
        if counts["left"]:
            lines.append(f"{counts['left']} candidates not compiled:")
            lines += [f"  {count:>5}  {reason}" for reason, count in self.ending.reason_counts()]
        for candidate, text in list(failures.items())[:3]:
            lines.append(f"  the compiler failed on {candidate}: {text.splitlines()[0][:160]}")
        if len(failures) > 3:
            lines.append(f"  and on {len(failures) - 3} more")
        return [*lines, f"stopped: {self.ending.text()}"]

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each plan: a row as of `plan --json`, and the values that the search chose."""
        return [self._row(one) for one in self.ranking]

    def _row(self, one: RankedPlan) -> dict[str, Any]:
        [row] = slices_json([one.verdict], self.tariff)["slices"]
        chosen = {"micro_batch": one.candidate.micro_batch, "remat": one.candidate.remat.model_dump()}
        return {**row, **chosen, "on_front": one.on_front, "within_limits": one.within}

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as `plan --search --json` prints it, without the name of the written file."""
        seconds, stopped = round(float(self.seconds), 1), self.ending.to_dict()
        return {"goal": self.goal, "seconds": seconds, **self._counts(), "stopped": stopped, "plans": self.rows()}

    def job_text(self) -> str:
        """Return the best plan as a job file, with the reason of each chosen value as a comment."""
        note = "interrupted before it was finished" if self.interrupted else ""
        written = _as_written(self.space, self.best, self.ranking)
        return job_file.winning_job(self.space.resolved, self.best, self.ranking, self.goal, written, note)

    def write_job(self, path: Path) -> None:
        """Write the best plan as a job file. A file that a search did not write is never replaced."""
        job_file.check_path(path)
        job_file.write(path, self.job_text())


def print_ranking(console: Console, found: Sequence[RankedPlan], title: str) -> None:
    """Print the ranking in the widest layout that the console has space for.

    The winner comes first, and plans on the Pareto front of time and cost are marked.
    """
    plain = not console.encoding.lower().startswith("utf")
    rows = shown(found, ROWS)
    tables = [_table(rows, DROPPED_WHEN_NARROW[:n], plain) for n in range(len(DROPPED_WHEN_NARROW) + 1)]
    print_widest(console, title, tables)
    mark = "*" if plain else "◆"
    rest = len(found) - len(rows)
    more = f" {rest} more were found." if rest else ""
    legend = f"{mark} no plan found is both faster and cheaper. Costs are on demand, with start-up and saves.{more}"
    console.print(Text(f"\n{legend}", style="dim"))


def _table(rows: Sequence[RankedPlan], dropped: Sequence[str], plain: bool) -> Table:
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [_cells(n, one, plain) for n, one in enumerate(rows)]
    left = ("", "slice", "mesh", "remat", "provider", "limits")
    unneeded = {"limits"} if all(one.within for one in rows) else set()
    unneeded |= {"provider"} if all(one.provider in (GOOGLE_CLOUD, None) for one in rows) else set()
    for heading in cells[0] if cells else ():
        if heading not in dropped and heading not in unneeded:
            table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True, vertical="bottom")
    kept = [str(column.header) for column in table.columns]
    for n, row in enumerate(cells):
        table.add_row(*(row[heading] for heading in kept), style="bold" if n == 0 else "")
    return table


def _cells(n: int, one: RankedPlan, plain: bool) -> dict[str, Text | str]:
    candidate, verdict = one.candidate, one.verdict
    per_chip = (verdict.tokens_per_second or 0) / candidate.slice.chips
    return {
        "": Text(("*" if plain else "◆") if one.on_front else "", style="yellow"),
        "slice": candidate.slice.name,
        "mesh": str(candidate.mesh),
        "micro-\nbatch": str(candidate.micro_batch),
        "acc": str(candidate.accumulation(verdict.question.job.batch)),
        "remat": remat_text(candidate.remat).removeprefix("remat "),
        "peak\nGiB": gib_text(verdict.memory.peak_bytes),
        "step": seconds_text(one.step_seconds),
        "tokens/s\nper chip": rate_text(per_chip),
        "hours": hours_text(one.hours),
        "cost": "no price" if one.usd is None else str(Usd(one.usd)),
        "provider": one.provider or "-",
        "limits": "" if one.within else Text("over", style="red"),
    }


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
