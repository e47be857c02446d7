"""Finding the best way to run a job: compilers side by side within the machine's memory, until nothing is better."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from forerun import interrupt
from forerun.config.schema import Job
from forerun.console import SafeConsole
from forerun.errors import UserError
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import Slice
from forerun.plan import cache, winner
from forerun.plan.candidates import Bounds, Candidate, Space, space_of
from forerun.plan.compiler import CompilerFailure, Phase, Stopped, require_compiler
from forerun.plan.figures import seconds_text
from forerun.plan.money import Tariff
from forerun.plan.question import Question
from forerun.plan.ranking import Found, equal_slices, ranked
from forerun.plan.report import as_json as slices_json
from forerun.plan.scoreboard import Scoreboard, account, best_text, print_ranking
from forerun.plan.strategy import GOALS, Goal, Outcome, Strategy
from forerun.plan.verdict import Verdict, verdict
from forerun.units import GIB, Bytes, Seconds, Usd

COMPILE_BYTES = 4 * GIB  # of host memory, for one compile of a large job
MOST_COMPILES = 150
PIPED_COLUMNS = 120
INTERRUPTED = 130
KILLED = "the compiler was killed"

Adjust = Callable[[Verdict], Verdict]
Ask = Callable[[Question, threading.Event, Phase], Verdict]


@dataclass
class Exploration:
    """What is known of a space."""

    adjust: Adjust = lambda answer: answer
    verdicts: dict[Candidate, Verdict] = field(default_factory=dict)
    failures: dict[Candidate, str] = field(default_factory=dict)
    recalled: int = 0
    compiled: int = 0
    interrupted: bool = False

    @property
    def known(self) -> dict[Candidate, Outcome]:
        told = {one: _outcome(answer) for one, answer in self.verdicts.items()}
        return told | {one: Outcome(None, None) for one in self.failures}


def _outcome(answer: Verdict) -> Outcome:
    return Outcome(answer.step.mid_seconds if answer.step else None, answer.memory.peak_bytes)


def run_search(
    job: Job,
    *,
    goal: str,
    max_hours: float | None = None,
    max_usd: float | None = None,
    on: str | Sequence[str] | None = None,
    zone: str | None = None,
    prices_file: str | None = None,
    out_path: Path | None = None,
    stream: TextIO | None = None,
    use_cache: bool = True,
    most_compiles: int = MOST_COMPILES,
    adjust: Adjust = lambda answer: answer,
    as_json: bool = False,
) -> int:
    """`job` is concrete. Prints the ranking to `stream` (stdout) and writes the winning job; 130 after Ctrl-C.

    With `as_json` the stream gets the ranking as JSON, and the words go to stderr.

    `adjust` corrects each verdict after the cache, such as by a calibration.
    """
    tariff = Tariff(zone, prices_file, max_usd)
    tariff.check()
    chosen_goal = _goal(goal)
    if out_path:
        winner.check_path(out_path)
    pattern = on if on is None or isinstance(on, str) else ",".join(on)
    bounds = Bounds(_usd_per_hour(tariff), max_hours, max_usd, needs_price=chosen_goal != "fastest")
    space = space_of(job, pattern, bounds)
    if not space.candidates:
        raise _nothing_left(space)
    strategy = Strategy(space, chosen_goal, _usd_per_second(space, bounds))
    found = Exploration(adjust=adjust)
    if use_cache:
        recall(space, found)
    started = time.monotonic()
    if strategy.next(found.known) is not None:
        require_compiler()
        with Scoreboard(space.size, found.recalled) as board:
            explore(strategy, found, tariff, max_hours, board, use_cache=use_cache, most_compiles=most_compiles)
    seconds = Seconds(time.monotonic() - started)
    told = partial(_told, space, found, chosen_goal, tariff, max_hours, out_path)
    if not as_json:
        return told(stream or sys.stdout, seconds, lambda content: None)
    return told(sys.stderr, seconds, lambda content: print(json.dumps(content, indent=2), file=stream or sys.stdout))


def _goal(goal: str) -> Goal:
    for known in GOALS:
        if goal == known:
            return known
    raise UserError(f"no goal is called {goal!r}", why=f"goals: {', '.join(GOALS)}", fix="--goal cheapest")


def _usd_per_hour(tariff: Tariff) -> Callable[[Slice], float | None]:
    def of(one: Slice) -> float | None:
        price = cheapest(one.chip.name, tariff.zone, hosts=one.hosts, override_file=tariff.prices_file)
        return None if price is None else price.usd_per_chip_hour_on_demand * one.chips

    return of


def _usd_per_second(space: Space, bounds: Bounds) -> dict[str, float | None]:
    rates: dict[str, float | None] = {}
    for name, group in space.by_slice.items():
        rate = bounds.usd_per_hour(group[0].slice)
        rates[name] = None if rate is None else rate / 3600
    return rates


def recall(space: Space, found: Exploration) -> None:
    """All that earlier plans and searches have left of this space."""
    if not cache.folder().is_dir():
        return
    there = {entry.name for entry in os.scandir(cache.folder())}
    for one in space.candidates:
        question = one.question(space.job)
        if f"{cache.key(question)}.json" not in there:
            continue
        if answer := cache.recall(question):
            found.verdicts[one] = found.adjust(answer)
            found.recalled += 1
        elif failure := cache.recall_failure(question):
            found.failures[one] = failure


def explore(
    strategy: Strategy,
    found: Exploration,
    tariff: Tariff,
    max_hours: float | None,
    board: Scoreboard,
    *,
    ask: Ask = verdict,
    use_cache: bool = True,
    most_compiles: int = MOST_COMPILES,
    cores: int | None = None,
) -> None:
    """Asks until the strategy has no more questions, the budget is spent, or Ctrl-C is pressed."""
    stop = threading.Event()
    workers = cores or os.cpu_count() or 1
    running: dict[Future[Verdict], Candidate] = {}
    job = strategy.space.job
    with interrupt.raising(), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            while True:
                while len(running) < workers and (not running or available_bytes() >= COMPILE_BYTES):
                    left = most_compiles - found.compiled - len(running)
                    one = strategy.next(found.known, running.values()) if left > 0 else None
                    if one is None:
                        break
                    board.started(one)
                    running[pool.submit(ask, one.question(job), stop, lambda phase: None)] = one
                if not running:
                    return
                done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    one = running.pop(future)
                    word = _heard(future, one, found, job, use_cache)
                    if KILLED in word:
                        workers = 1
                    best = next(iter(ranked(found.verdicts, strategy.goal, tariff, max_hours)), None)
                    board.finished(one, word, best_text(best), _open_questions(strategy, found), workers)
        except KeyboardInterrupt:
            found.interrupted = True
        finally:
            stop.set()


def _heard(future: Future[Verdict], one: Candidate, found: Exploration, job: Job, use_cache: bool) -> str:
    """Files the answer, and says it in a word. A candidate on which the compiler breaks does not end the search."""
    try:
        answer = future.result()
    except Stopped:
        return "stopped"
    except CompilerFailure as failure:
        found.failures[one] = str(failure)
        if use_cache:
            cache.remember_failure(one.question(job), str(failure))
        return "the compiler failed"
    except UserError as error:
        if KILLED not in error.what:
            raise
        found.failures[one] = error.what
        return f"{KILLED}: from now on one at a time"
    except Exception as error:  # our bug: told, not remembered, and no reason to lose hours of other answers
        found.failures[one] = f"{type(error).__name__}: {error}"
        return f"failed: {found.failures[one]}"
    found.verdicts[one] = found.adjust(answer)
    found.compiled += 1
    if use_cache:
        cache.remember(answer)
    if not answer.fits or answer.step is None:
        return f"{-answer.spare_bytes / GIB:.2f} GiB too large"
    return f"{answer.step.mid_seconds:.3g} s a step"


def _open_questions(strategy: Strategy, found: Exploration) -> int:
    known = found.known
    return len({one for one in strategy.proposals(known) if one not in known})


def available_bytes() -> int:
    """Host memory that is free to use: the machine's, or what the container leaves."""
    found = [_meminfo_bytes()]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found.append(
            int((group / "memory.max").read_text("utf-8")) - int((group / "memory.current").read_text("utf-8"))
        )
    return min(found)


def _meminfo_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2 * COMPILE_BYTES


def _told(
    space: Space,
    found: Exploration,
    goal: Goal,
    tariff: Tariff,
    max_hours: float | None,
    out_path: Path | None,
    stream: TextIO,
    seconds: Seconds,
    on_result: Callable[[dict[str, Any]], None],
) -> int:
    ranking = ranked(found.verdicts, goal, tariff, max_hours)
    too_large = sum(not answer.fits for answer in found.verdicts.values())
    left = len(space.candidates) - len(found.verdicts) - len(found.failures)
    tally = (space.size, space.ruled_out, found.compiled, found.recalled, too_large, found.failures, left)
    console = SafeConsole(file=stream, width=None if stream.isatty() else PIPED_COLUMNS)
    if found.interrupted:
        console.print(f"interrupted after {seconds}: this is what was found; the same command goes on from here")
    if not ranking or not ranking[0].within:
        if ranking:
            print_ranking(console, ranking, f"{space.job.name}: nothing within the limits")
        console.print("\n".join(account(*tally)))
        if found.interrupted:
            return INTERRUPTED
        raise _nothing_found(ranking, found, tariff, max_hours)
    best = ranking[0]
    print_ranking(console, ranking, f"{space.job.name}: {goal} of {len(ranking)} plans that fit, in {seconds}")
    idle = filter(None, [best.verdict.question.idle_text()])
    equal = equal_slices(ranking, goal)
    same = [f"Equal to {best.candidate.slice.name} within the error of the times: {', '.join(equal)}."] if equal else []
    console.print("\n".join(["", *account(*tally), "", *same, *idle, *_gain(space, best, found, ranking)]))
    path = out_path or Path(f"{space.job.name}.{goal}.yaml")
    winner.check_path(path)
    note = "interrupted before it was finished" if found.interrupted else ""
    winner.write(path, winner.winning_job(space.job, best, ranking, goal, _as_written(space, best, ranking), note))
    console.print(f"written: {path}; check it with: forerun plan {path} --on {best.candidate.slice.name}")
    names = ("candidates", "ruled_out", "compiled", "recalled", "too_large", "failed", "left")
    counted = dict(zip(names, tally, strict=True)) | {"failed": len(found.failures)}
    plans = [_plan_json(one, tariff) for one in ranking]
    on_result({"goal": goal, "seconds": round(float(seconds), 1), **counted, "written": str(path), "plans": plans})
    return INTERRUPTED if found.interrupted else 0


def _plan_json(one: Found, tariff: Tariff) -> dict[str, Any]:
    """A row as of `plan --json`, and what makes it another plan than its neighbours."""
    [row] = slices_json([one.verdict], tariff)["slices"]
    chosen = {"micro_batch": one.candidate.micro_batch, "remat": one.candidate.remat.model_dump()}
    return {**row, **chosen, "on_front": one.on_front, "within_limits": one.within}


def _as_written(space: Space, best: Found, ranking: Sequence[Found]) -> Found | None:
    own = space.as_written.get(best.candidate.slice.name)
    return next((one for one in ranking if one.candidate == own), None)


def _gain(space: Space, best: Found, found: Exploration, ranking: Sequence[Found]) -> list[str]:
    """What the search has changed for the better, on the winner's slice."""
    name = best.candidate.slice.name
    own = space.as_written.get(name)
    if own == best.candidate:
        return [f"The job as it is written is the best that was found on {name}."]
    if own is None or own not in found.verdicts:
        return []
    rival, values = _as_written(space, best, ranking), str(own).removeprefix(f"{name} ")
    if rival is None:
        short = Bytes(-found.verdicts[own].spare_bytes)
        return [f"The job as it is written ({values}) does not fit {name}: {short} short."]
    faster = f"{rival.step_seconds / best.step_seconds:.2f}x as fast"
    return [
        f"The job as it is written ({values}): {seconds_text(rival.step_seconds)} a step. The plan found is {faster}."
    ]


def _nothing_left(space: Space) -> UserError:
    reasons = "; ".join(f"{n} x {why}" for why, n in space.ruled_out.most_common(3)) or "no slice holds the job"
    return UserError(
        f"all {space.size} candidates are ruled out by formula",
        why=reasons,
        fix="loosen the limit that rules out most, or allow more slices: --on 'v5p-*'",
    )


def _nothing_found(ranking: Sequence[Found], found: Exploration, tariff: Tariff, max_hours: float | None) -> UserError:
    if not found.verdicts:
        one, text = next(iter(found.failures.items()))
        raise CompilerFailure(f"none of {len(found.failures)} candidates could be compiled; {one}: {text}")
    if not ranking:
        nearest = max(found.verdicts.values(), key=lambda v: v.spare_bytes)
        short = f"the nearest is {nearest.question.slice.name}, {-nearest.spare_bytes / GIB:.2f} GiB short"
        return UserError(
            f"none of the {len(found.verdicts)} plans that were compiled fits",
            why=f"the compiler refused them all; {short}",
            fix="allow larger slices: --on 'v5p-*', or choose from: forerun hardware slices",
        )
    cheap = min((one.usd for one in ranking if one.usd is not None), default=None)
    fast = min(one.hours for one in ranking)
    limits = [f"--max-usd {tariff.max_usd:g}"] if tariff.max_usd is not None else []
    limits += [f"--max-hours {max_hours:g}"] if max_hours is not None else []
    return UserError(
        f"no plan stays within {' and '.join(limits)}",
        why=f"the cheapest costs {'nothing known' if cheap is None else Usd(cheap)}, the fastest takes {fast:.3g} h",
        fix="raise the limit, train for fewer steps, or allow other slices with --on",
    )
