"""The search for the best plan of a job: compile candidates in parallel until the strategy has no better ones."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from forerun import interrupt
from forerun.console import SafeConsole, SafeLive, can_redraw
from forerun.errors import UserError
from forerun.exit_codes import INTERRUPTED
from forerun.hardware.slices import Slice
from forerun.planner.compile import result_cache
from forerun.planner.compile.compiler import CompilerFailure, OnPhase, Stopped, verdict
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.fork_server import fork_server
from forerun.planner.compile.installed_compilers import require_compilers
from forerun.planner.compile.request import CompileRequest
from forerun.planner.cost.job_cost import ASSUMPTIONS, Tariff
from forerun.planner.report.formatting import hours_text, step_text
from forerun.planner.search import job_file
from forerun.planner.search.outcome import Adjust, Exploration, SearchOutcome, ending_of
from forerun.planner.search.ranking import RankedPlan, ranked
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import GOALS, LOOK_AHEAD, Goal, Strategy
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, Seconds, Usd

COMPILE_BYTES = 4 * GIB  # host memory that one compile of a large job needs
MAX_COMPILES = 150
PIPED_COLUMNS = 120
KILLED = "the compiler was killed"

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

Ask = Callable[[CompileRequest, threading.Event, OnPhase], FitResult]


class Scoreboard:
    """A context manager that shows a search's progress: a live screen on a terminal, a line per result elsewhere."""

    def __init__(self, space_size: int, recalled: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._space_size, self._recalled = space_size, recalled
        self._began = time.monotonic()
        self._running: dict[Candidate, float] = {}
        self._seconds: list[float] = []
        self._best = ""
        self._open, self._workers = 0, 1
        self._live: SafeLive | None = None

    def __enter__(self) -> Scoreboard:
        console = SafeConsole(file=self._stream)
        if can_redraw(console):
            self._live = SafeLive(get_renderable=self.screen, console=console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.stop()

    def started(self, one: Candidate) -> None:
        """Record that the compile of a candidate has started."""
        self._running[one] = time.monotonic()

    def finished(self, one: Candidate, word: str, best: str, still_open: int, workers: int) -> None:
        """Record the result of a candidate.

        Args:
            one: The candidate.
            word: The result as a short text.
            best: The best plan so far as text.
            still_open: Number of candidates that the search will still compile if all results are as predicted.
            workers: Number of compiles in parallel.
        """
        seconds = time.monotonic() - self._running.pop(one)
        self._seconds.append(seconds)
        self._best, self._open, self._workers = best, still_open, max(1, workers)
        if not self._live:
            count = len(self._seconds)
            line = f"[{count}, {self._more_text()}{self._eta_text()}] {one}: {word} after {seconds:.1f} s"
            print(line, file=self._stream, flush=True)

    def eta_seconds(self) -> float | None:
        """Return the estimated remaining time, or None before the first result."""
        if not self._seconds:
            return None
        recent = self._seconds[-20:]
        return self._open * sum(recent) / len(recent) / self._workers

    def _more_text(self) -> str:
        return f"{'at least' if self._open >= LOOK_AHEAD else 'about'} {self._open} more"

    def _eta_text(self) -> str:
        eta = self.eta_seconds()
        return "" if not eta else f", {Seconds(eta)}"

    def screen(self) -> Group:
        """Return the live screen: counts, running compiles, and the best plan so far."""
        now = time.monotonic()
        head = Text.assemble(
            (f"{self._space_size} candidates", "bold"),
            f" · {self._recalled} from the cache · {len(self._seconds)} compiled · {self._more_text()}",
        )
        clock = f"{Seconds(now - self._began)} so far"
        if self._seconds:
            clock += f" · ETA {Seconds(self.eta_seconds() or 0)}"
        lines: list[Text] = [head, Text(clock)]  # two lines, so that neither wraps at 80 columns
        for one, began in list(self._running.items()):
            frame = FRAMES[int(now * 8) % len(FRAMES)]
            lines.append(Text.assemble((frame, "cyan"), f" {one}", (f"  {now - began:.0f} s", "dim")))
        if self._best:
            lines.append(Text.assemble(("best so far ", "green"), self._best))
        return Group(*lines)


def best_text(best: RankedPlan | None) -> str:
    """Return a plan as one line, or an empty string for None."""
    if best is None:
        return ""
    cost = "no price" if best.usd is None else str(Usd(best.usd))
    return f"{best.candidate}: {step_text(best.verdict)} a step, {hours_text(best.hours)} h, {cost}"


def find_plans(
    resolved: ResolvedJob,
    *,
    goal: str,
    max_hours: float | None = None,
    max_usd: float | None = None,
    on: str | Sequence[str] | None = None,
    zone: str | None = None,
    providers: Sequence[str] = (),
    prices_file: str | None = None,
    use_cache: bool = True,
    most_compiles: int | None = None,
    compile_all: bool = False,
    adjust: Adjust = lambda answer: answer,
) -> SearchOutcome:
    """Search slices, meshes, micro-batch sizes and remat policies, and return everything that was found.

    Args:
      resolved: the job to search for.
      goal: cheapest, fastest or balanced.
      max_hours: omit plans that take longer.
      max_usd: omit plans that cost more.
      on: slices or patterns; None means all slices.
      zone: the zone of the prices; None means the cheapest.
      providers: the providers of the prices; empty means the cheapest.
      prices_file: a file with prices that replace the list prices.
      use_cache: use results of earlier compilations, and store new ones.
      most_compiles: the search ends after this many compilations; None means 150, or no limit with `compile_all`.
      compile_all: compile all candidates that may fit, also those that are not expected to win.
      adjust: corrects each result after the cache, for example by a calibration.

    Raises:
      UserError: All candidates are impossible or exceed the limits before anything is compiled.
    """
    tariff = Tariff(zone, prices_file, max_usd, tuple(providers))
    tariff.check()
    chosen_goal = _goal(goal)
    pattern = on if on is None or isinstance(on, str) else ",".join(on)
    bounds = price_bounds(tariff, needs_price=chosen_goal != "fastest", max_hours=max_hours)
    space = space_of(resolved, pattern, replace(bounds, obstacle=_missing_compiler))
    if not space.candidates:
        asked = {one.slice.name: one.slice for one in space.dropped}
        if all(map(_missing_compiler, asked.values())):
            require_compilers(asked.values())
        raise _nothing_left(space)
    strategy = replace(strategy_of(space, chosen_goal, tariff), compile_all=compile_all)
    if most_compiles is None:
        most_compiles = len(space.candidates) if compile_all else MAX_COMPILES
    found = Exploration(adjust=adjust)
    if use_cache:
        recall(space, found)
    started = time.monotonic()
    if strategy.next(found.known) is not None:
        require_compilers(space.by_slice[name][0].slice for name in space.by_slice)
        with Scoreboard(space.size, found.recalled) as board:
            explore(strategy, found, tariff, max_hours, board, use_cache=use_cache, most_compiles=most_compiles)
    ending = ending_of(strategy, found.known, interrupted=found.interrupted)
    return SearchOutcome(space, found, chosen_goal, tariff, max_hours, Seconds(time.monotonic() - started), ending)


def run_search(
    resolved: ResolvedJob,
    *,
    goal: str,
    out_path: Path | None = None,
    stream: TextIO | None = None,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Search the best plan, print the ranking and write the winning job. Return the exit code: 130 after Ctrl-C.

    Args:
      resolved: the job to search for.
      goal: cheapest, fastest or balanced.
      out_path: the file of the winning job; default: the name of the job and the goal.
      stream: where the ranking is printed; default: stdout.
      as_json: print the ranking as JSON to `stream`, and the text to stderr.
      **options: see `find_plans`.
    """
    chosen_goal = _goal(goal)
    if out_path:
        job_file.check_path(out_path)
    outcome = find_plans(resolved, goal=chosen_goal, **options)
    stream = stream or sys.stdout
    text_stream = sys.stderr if as_json else stream
    console = SafeConsole(file=text_stream, width=None if text_stream.isatty() else PIPED_COLUMNS)
    outcome.print(console)
    if not outcome.has_plan:
        if outcome.interrupted:
            return INTERRUPTED
        outcome.require_plan()
    path = out_path or Path(f"{outcome.space.job.name}.{chosen_goal}.yaml")
    outcome.write_job(path)
    console.print(f"written: {path}; check it with: forerun plan {path} --on {outcome.best.candidate.slice.name}")
    if as_json:
        print(json.dumps({**outcome.to_dict(), "written": str(path)}, indent=2), file=stream)
    return INTERRUPTED if outcome.interrupted else 0


def _goal(goal: str) -> Goal:
    for known in GOALS:
        if goal == known:
            return known
    raise UserError(
        "E-PLAN-018", f"no goal is called {goal!r}", why=f"goals: {', '.join(GOALS)}", fix="--goal cheapest"
    )


def _missing_compiler(target: Slice) -> str | None:
    """Return the reason why nothing can be compiled for a slice here, with the fix, or None."""
    try:
        require_compilers([target])
    except UserError as error:
        return f"{error.what}: {error.fix}"
    return None


def price_bounds(tariff: Tariff, *, needs_price: bool, max_hours: float | None = None) -> Bounds:
    """Return the limits of a search with the prices of a tariff, per slice and hour on demand."""

    def usd_per_hour(one: Slice) -> float | None:
        price = tariff.price_of(one)
        return None if price is None else price.usd_per_chip_hour_on_demand * one.chips

    return Bounds(usd_per_hour, max_hours, tariff.max_usd, needs_price)


def strategy_of(space: Space, goal: Goal, tariff: Tariff) -> Strategy:
    """Return the strategy for a space, with the prices of its slices and the time that every run needs beside steps."""
    usd_per_hour = price_bounds(tariff, needs_price=False).usd_per_hour
    rates: dict[str, float | None] = {}
    overheads: dict[str, float] = {}
    for name, group in space.by_slice.items():
        rate = usd_per_hour(group[0].slice)
        rates[name] = None if rate is None else rate / 3600
        written = space.sizes.resting_bytes / group[0].slice.hosts / ASSUMPTIONS.bucket_bytes_per_second
        begin = ASSUMPTIONS.start_seconds + ASSUMPTIONS.compile_seconds
        overheads[name] = (begin + written) / (space.job.steps or 1)
    return Strategy(space, goal, rates, overheads)


def recall(space: Space, found: Exploration) -> None:
    """Add all cached results and failures of earlier plans and searches in this space to `found`."""
    if not result_cache.folder().is_dir():
        return
    cached = {entry.name for entry in os.scandir(result_cache.folder())}
    for one in space.candidates:
        question = one.question(space.resolved)
        if f"{result_cache.key(question)}.json" not in cached:
            continue
        if answer := result_cache.recall(question):
            found.verdicts[one] = found.adjust(answer)
            found.recalled += 1
        elif failure := result_cache.load_failure(question):
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
    most_compiles: int = MAX_COMPILES,
    cores: int | None = None,
) -> None:
    """Compile candidates until the strategy has no more, `most_compiles` is reached, or the user presses Ctrl-C.

    Results are added to `found`. After Ctrl-C, `found.interrupted` is set and running compiles are stopped.
    At most `cores` compiles run in parallel (default: one per CPU core), and only while host memory is available.
    """
    stop = threading.Event()
    workers = cores or os.cpu_count() or 1
    running: dict[Future[FitResult], Candidate] = {}
    finished: list[tuple[Candidate, str]] = []
    resolved = strategy.space.resolved
    with fork_server(), interrupt.raising(), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            while True:
                # One compile always runs, so that the search continues on a machine with little memory.
                while len(running) < workers and (not running or available_bytes() >= COMPILE_BYTES):
                    left = most_compiles - found.compiled - len(running)
                    one = strategy.next(found.known, running.values()) if left > 0 else None
                    if one is None:
                        break
                    board.started(one)
                    running[pool.submit(ask, one.question(resolved), stop, lambda phase: None)] = one
                # Looking ahead takes up to a second in a large space, so the next compiles start before it.
                for one, word in finished:
                    best = next(iter(ranked(found.verdicts, strategy.goal, tariff, max_hours)), None)
                    more = min(strategy.expected_compiles(found.known), most_compiles - found.compiled)
                    board.finished(one, word, best_text(best), more, workers)
                finished.clear()
                if not running:
                    return
                done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    one = running.pop(future)
                    word = _record_result(future, one, found, resolved, use_cache)
                    if KILLED in word:  # probably out of memory: avoid parallel compiles from now on
                        workers = 1
                    finished.append((one, word))
        except KeyboardInterrupt:
            found.interrupted = True
        finally:
            stop.set()


def _record_result(
    future: Future[FitResult], one: Candidate, found: Exploration, resolved: ResolvedJob, use_cache: bool
) -> str:
    """Record the result of a compile in `found`, and return it as a short text.

    A failure of the compiler on one candidate does not end the search. Errors in the job are raised.
    """
    try:
        answer = future.result()
    except Stopped:
        return "stopped"
    except CompilerFailure as failure:
        found.failures[one] = str(failure)
        if use_cache:
            result_cache.store_failure(one.question(resolved), str(failure))
        return "the compiler failed"
    except UserError as error:
        if KILLED not in error.what:
            raise
        found.failures[one] = error.what
        return f"{KILLED}: compiling one at a time from now on"
    except Exception as error:  # a bug in forerun: report and do not cache it, but keep hours of other results
        found.failures[one] = f"{type(error).__name__}: {error}"
        return f"failed: {found.failures[one]}"
    found.verdicts[one] = replace(found.adjust(answer), module=None)  # a program takes tens of MB
    found.compiled += 1
    if use_cache:
        result_cache.remember(answer)
    if not answer.fits or answer.step is None:
        return f"{-answer.spare_bytes / GIB:.2f} GiB too large"
    return f"{answer.step.mid_seconds:.3g} s a step"


def available_bytes() -> int:
    """Return the available host memory: the machine's, or that within the container's limit if it is less."""
    found = [_meminfo_bytes()]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found.append(
            int((group / "memory.max").read_text("utf-8")) - int((group / "memory.current").read_text("utf-8"))
        )
    return min(found)


def _meminfo_bytes() -> int:
    """Return the machine's available memory, or enough for two compiles if it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2 * COMPILE_BYTES


def _nothing_left(space: Space) -> UserError:
    reasons = "; ".join(f"{n} x {why}" for why, n in space.ruled_out.most_common(3)) or "no slice holds the job"
    return UserError(
        "E-PLAN-019",
        f"all {space.size} candidates are ruled out by formula",
        why=reasons,
        fix="loosen the limit that rules out most, or allow more slices: --on 'v5p-*'",
    )
