"""Terminal output of a search: its progress, then the ranked table."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forerun.console import SafeConsole, SafeLive, can_redraw
from forerun.hardware.prices import GOOGLE_CLOUD
from forerun.planner.report.formatting import gib_text, hours_text, rate_text, seconds_text, step_text
from forerun.planner.search.ranking import RankedPlan, shown
from forerun.planner.search.search_ending import SearchEnding
from forerun.planner.search.space import Candidate, remat_text
from forerun.planner.search.strategy import LOOK_AHEAD
from forerun.units import Seconds, Usd

ROWS = 12
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
DROPPED_WHEN_NARROW = ("tokens/s\nper chip", "peak\nGiB", "acc", "hours")


class Scoreboard:
    """A context manager that shows a search's progress: a live screen on a terminal, a line per result elsewhere."""

    def __init__(self, space_size: int, recalled: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream, self._quiet = stream or sys.stderr, quiet
        self._space_size, self._recalled = space_size, recalled
        self._began = time.monotonic()
        self._running: dict[Candidate, float] = {}
        self._seconds: list[float] = []
        self._best = ""
        self._open, self._workers = 0, 1
        self._live: SafeLive | None = None

    def __enter__(self) -> Scoreboard:
        console = SafeConsole(file=self._stream)
        if can_redraw(console) and not self._quiet:
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
        if not self._live and not self._quiet:
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


def print_ranking(console: Console, found: Sequence[RankedPlan], title: str) -> None:
    """Print the ranking in the widest layout that the console has space for.

    The winner comes first, and plans on the Pareto front of time and cost are marked.
    """
    plain = not console.encoding.lower().startswith("utf")
    rows = shown(found, ROWS)
    layouts = [DROPPED_WHEN_NARROW[:n] for n in range(len(DROPPED_WHEN_NARROW) + 1)]
    tables = [_table(rows, dropped, plain) for dropped in layouts]
    roomy = console.options.update(width=1000)
    widths = [console.measure(table, options=roomy).maximum for table in tables]
    chosen = next((n for n, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])
    console.print(Text(title, style="bold"), "", sep="\n")
    console.print(tables[chosen])
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


def candidate_counts(
    ending: SearchEnding,
    space_size: int,
    ruled_out: Counter[str],
    compiled: int,
    recalled: int,
    too_large: int,
    failures: Mapping[Candidate, str],
    left: int,
) -> list[str]:
    """Return lines that account for every candidate of the space: compiled, ruled out, failed, or not compiled.

    The last line is the reason why the search stopped.
    """
    asked = f"{compiled} compiled, {recalled} from the cache" if recalled else f"{compiled} compiled"
    lines = [
        f"{space_size} candidates: {asked} ({too_large} of them do not fit), {ruled_out.total()} ruled out by formula"
    ]
    lines += [f"  {count:>5}  {reason}" for reason, count in ruled_out.most_common()]
    if left:
        lines.append(f"{left} candidates not compiled:")
        lines += [f"  {count:>5}  {reason}" for reason, count in ending.reason_counts()]
    for one, text in list(failures.items())[:3]:
        lines.append(f"  the compiler failed on {one}: {text.splitlines()[0][:160]}")
    if len(failures) > 3:
        lines.append(f"  and on {len(failures) - 3} more")
    return [*lines, f"stopped: {ending.text()}"]
