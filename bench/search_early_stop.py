"""Compare the early stop of the search with compiling every candidate, on 20 random jobs.

python bench/search_early_stop.py               # compiles what is missing (about 40 CPU minutes), then prints the table
python bench/search_early_stop.py --report      # only the table, from the recorded results
python bench/search_early_stop.py --write       # the table, also into docs/how-to/search.md

Every candidate of each job is compiled once, and its result is appended to bench/results/search_early_stop.jsonl. The
search then receives the recorded results as it requests them. So both searches see the same compiler. An interrupted
run continues where it stopped. Step times are predictions, not measured on TPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_quality import usd_per_hour

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.planner.compile.compiler import CompilerFailure, verdict
from forerun.planner.compile.fork_server import fork_server
from forerun.planner.search.outcome import SearchEnding, ending_of
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import Outcome, Strategy
from forerun.resolve.resolved_job import ResolvedJob

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "search_early_stop.jsonl"
PAGE = HERE.parent / "docs" / "how-to" / "search.md"
BEGIN, END = "<!-- early stop -->", "<!-- end early stop -->"
JOBS = 20
SLICES = ("v5e-1", "v6e-1", "v5e-4", "v6e-4", "v5p-8", "v4-8", "v5e-8", "v6e-8")
NAMED = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "llama3.2-1b", "qwen2.5-1.5b", "qwen3-1.7b")
SMALL, LARGE = range(10, 13), range(10, 19)  # affordable sizes of the spaces; every fifth job may have a larger one


@dataclass(frozen=True)
class SearchJob:
    """A job and the slice that it is searched on."""

    seed: int | None  # None: from the results of another bench
    on: str
    values: dict[str, Any]

    def space(self) -> Space:
        job = Job.model_validate({"name": "job", "data": "text", "steps": 1000, **self.values})
        return space_of(ResolvedJob(job), self.on, Bounds(usd_per_hour, needs_price=True))

    @property
    def text(self) -> str:
        """The model and the batch in words."""
        model, batch = self.values["model"], f"{self.values['batch']} x {self.values['sequence']}"
        if isinstance(model, dict):
            model = f"{model['layers']} layers, embed {model['embed']}, {model['heads']} heads"
        return f"{model}, batch {batch}"


def random_job(seed: int) -> SearchJob:
    """Return the first random job of a seed whose space has an affordable size."""
    dice = random.Random(f"search-early-stop {seed}")
    while True:
        job = SearchJob(seed, dice.choice(SLICES), _values(dice))
        try:
            size = len(job.space().candidates)
        except UserError:
            continue
        if size in (LARGE if seed % 5 == 1 else SMALL):
            return job


def _values(dice: random.Random) -> dict[str, Any]:
    model: Any = dice.choice(NAMED)
    if dice.random() < 0.5:
        heads = dice.choice((3, 4, 6, 8, 12, 16))
        model = {
            "layers": dice.choice((4, 8, 12, 16, 24)),
            "embed": heads * dice.choice((64, 128)),
            "heads": heads,
            "vocab": dice.choice((512, 32_000, 50_304)),
        }
    return {
        "model": model,
        "sequence": dice.choice((512, 1024, 2048, 4096)),
        "batch": dice.choice((2, 3, 4, 6, 8, 12, 16, 24, 32)),
        "remat": dice.choice(("full", "none", "dots")),
    }


def recorded() -> dict[int, dict[str, dict[str, Any]]]:
    """Return the recorded results by seed and candidate."""
    answers: dict[int, dict[str, dict[str, Any]]] = {}
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    for row in map(json.loads, lines):
        answers.setdefault(row["job"], {})[row["candidate"]] = row
    return answers


def compile_missing(seeds: range) -> None:
    """Compile the candidates without a recorded result, one at a time, and append their results."""
    for seed in seeds:
        job, known = random_job(seed), recorded().get(seed, {})
        space = job.space()
        missing = [one for one in space.candidates if str(one) not in known]
        for n, one in enumerate(missing):
            row = {"job": seed, "candidate": str(one), **compiled(space, one)}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"job {seed}, {n + 1}/{len(missing)}: {row}", file=sys.stderr, flush=True)


def compiled(space: Space, one: Candidate) -> dict[str, Any]:
    """Compile a candidate, and return its result and the CPU time that it took."""
    began = cpu_seconds()
    try:
        answer = verdict(one.question(space.resolved), threading.Event())
    except CompilerFailure as failure:
        found: dict[str, Any] = {"failure": str(failure).splitlines()[0][:200]}
    else:
        seconds = answer.step.mid_seconds if answer.step else None
        found = {"step_seconds": seconds, "peak_bytes": int(answer.memory.peak_bytes)}
    return {**found, "cpu_seconds": round(cpu_seconds() - began, 2)}


def cpu_seconds() -> float:
    """Return the CPU time of this process, of its children, and of their children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(one.ru_utime + one.ru_stime for one in used)
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text("utf-8").split():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = Path(f"/proc/{child}/stat").read_text("utf-8").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # user and system, own and children's
    return total


@dataclass(frozen=True)
class Comparison:
    """The search with the early stop against all candidates, for one job whose candidates are all compiled."""

    job: SearchJob
    space: Space
    asked: tuple[Candidate, ...]  # in the order of the search
    answers: dict[str, dict[str, Any]]
    ending: SearchEnding

    @property
    def candidates(self) -> int:
        return len(self.space.candidates)

    @property
    def winner(self) -> Candidate:
        return self._best(self.asked)

    @property
    def best(self) -> Candidate:
        """The best of all candidates."""
        return self._best(self.space.candidates)

    @property
    def regret(self) -> float:
        """How much longer the step of the winner is than the best step, as a share."""
        return self._seconds(self.winner) / self._seconds(self.best) - 1

    @property
    def winner_place(self) -> int:
        """The number of compiles until the winner was compiled."""
        return self.asked.index(self.winner) + 1

    def cpu_seconds(self, candidates: Sequence[Candidate]) -> float:
        return sum(self.answers[str(one)]["cpu_seconds"] for one in candidates)

    def _best(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=self._seconds)

    def _seconds(self, one: Candidate) -> float:
        return self.answers[str(one)].get("step_seconds") or math.inf

    def row(self) -> list[str]:
        return [
            "earlier" if self.job.seed is None else str(self.job.seed),
            self.job.text,
            self.job.on,
            str(self.candidates),
            str(len(self.asked)),
            str(self.winner_place),
            f"{self.cpu_seconds(self.asked):.0f}" if self.job.seed is not None else "-",
            f"{self.cpu_seconds(self.space.candidates):.0f}" if self.job.seed is not None else "-",
            self.ending.cause,
            "yes" if self.winner == self.best else "no",
            f"{100 * self.regret:.1f} %",
        ]


def compared(job: SearchJob, answers: dict[str, dict[str, Any]]) -> Comparison | None:
    """Run the search on recorded results; None if some candidates are not compiled yet."""
    space = job.space()
    if any(str(one) not in answers for one in space.candidates):
        return None
    strategy = Strategy(space, "cheapest", {name: 1.0 for name in space.by_slice})
    known: dict[Candidate, Outcome] = {}
    while (one := strategy.next(known)) is not None:
        known[one] = Outcome(answers[str(one)].get("step_seconds"), answers[str(one)].get("peak_bytes"))
    return Comparison(job, space, tuple(known), answers, ending_of(strategy, known, interrupted=False))


def earlier_jobs() -> Iterator[tuple[SearchJob, dict[str, dict[str, Any]]]]:
    """Yield the jobs of two other benches, one slice at a time. The errors of the predictions were chosen with them."""
    tasks = list(json.loads((HERE / "results" / "search_quality.json").read_text("utf-8"))["tasks"].values())
    for task in (*tasks, json.loads((HERE / "results" / "search_gpu.json").read_text("utf-8"))):
        for on in task["on"].split(","):
            yield SearchJob(None, on, task["job"]), task["answers"]


def report(found: Sequence[Comparison]) -> str:
    """Return the table as Markdown, with a summary of the random jobs."""
    heads = ("job", "model and batch", "slice", "candidates", "compiled", "winner after", "CPU s", "CPU s of all",
             "stopped by", "same winner", "regret")  # fmt: skip
    rows = [list(heads), ["---"] * len(heads), *(one.row() for one in found)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    found = [one for one in found if one.job.seed is not None]
    asked, every = sum(len(one.asked) for one in found), sum(one.candidates for one in found)
    early = sum(one.cpu_seconds(one.asked) for one in found)
    full = sum(one.cpu_seconds(one.space.candidates) for one in found)
    same = sum(one.winner == one.best for one in found)
    return "\n".join(
        [
            *lines,
            "",
            f"{len(found)} of the {JOBS} random jobs are compiled completely; the others are not in the table.",
            f"Random jobs: the early stop compiled {asked} of {every} candidates, in {early:.0f} of {full:.0f} CPU s.",
            f"It found the best plan of all candidates for {same} of {len(found)} jobs. The largest regret is"
            f" {100 * max((one.regret for one in found), default=0.0):.1f} %.",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first job")
    parser.add_argument("--count", type=int, default=JOBS, help="the number of jobs")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    parser.add_argument("--write", action="store_true", help="compile nothing, and write the table to the page")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.count)
    if not args.report and not args.write:
        with fork_server():
            compile_missing(seeds)
    answers = recorded()
    found = [one for seed in seeds if seed in answers and (one := compared(random_job(seed), answers[seed]))]
    text = report([*found, *(one for job in earlier_jobs() if (one := compared(*job)))])
    print(text)
    if len(found) < len(seeds):
        print(f"{len(seeds) - len(found)} jobs are not compiled completely", file=sys.stderr)
    if args.write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
