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
import json
import random
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_quality import usd_per_hour

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.fit_result import verdict
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.resolve.resolved_job import ResolvedJob

RESULTS = Path(__file__).resolve().parent / "results" / "search_early_stop.jsonl"
JOBS = 20
SLICES = ("v5e-1", "v6e-1", "v5e-4", "v6e-4", "v5p-8", "v4-8", "v5e-8", "v6e-8")
NAMED = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "llama3.2-1b", "qwen2.5-1.5b", "qwen3-1.7b")
SMALL, LARGE = range(10, 13), range(10, 19)  # affordable sizes of the spaces; every fifth job may have a larger one


@dataclass(frozen=True)
class RandomJob:
    """A random job and the slice that it is searched on."""

    seed: int
    on: str
    values: dict[str, Any]

    def space(self) -> Space:
        job = Job.model_validate({"name": f"job-{self.seed}", "data": "text", "steps": 1000, **self.values})
        return space_of(ResolvedJob(job), self.on, Bounds(usd_per_hour, needs_price=True))

    @property
    def text(self) -> str:
        """The model and the batch in words."""
        model, batch = self.values["model"], f"{self.values['batch']} x {self.values['sequence']}"
        if isinstance(model, dict):
            model = f"{model['layers']} layers, embed {model['embed']}, {model['heads']} heads"
        return f"{model}, batch {batch}"


def random_job(seed: int) -> RandomJob:
    """Return the first random job of a seed whose space has an affordable size."""
    dice = random.Random(f"search-early-stop {seed}")
    while True:
        job = RandomJob(seed, dice.choice(SLICES), _values(dice))
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
    """Compile a candidate, and return its result and the CPU time of this process and its ended children."""
    began = sum(cpu_seconds())
    try:
        answer = verdict(one.question(space.resolved), threading.Event())
    except CompilerFailure as failure:
        found: dict[str, Any] = {"failure": str(failure).splitlines()[0][:200]}
    else:
        seconds = answer.step.mid_seconds if answer.step else None
        found = {"step_seconds": seconds, "peak_bytes": int(answer.memory.peak_bytes)}
        if answer.step:
            found["parts_seconds"] = {name: round(s, 7) for name, s in answer.step.parts_seconds.items()}
    return {**found, "cpu_seconds": round(sum(cpu_seconds()) - began, 2)}


def cpu_seconds() -> Iterator[float]:
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        yield used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first job")
    parser.add_argument("--count", type=int, default=JOBS, help="the number of jobs")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.count)
    if not args.report:
        compile_missing(seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
