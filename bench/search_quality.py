"""Quality of the search: its result compared with the best of all compiled candidates.

python bench/search_quality.py      # an hour on two cores; needs libtpu, no TPU. Resumes where it stopped.

All candidates are compiled except those whose weights, optimizer and saved activations cannot fit. This includes
candidates that the search skips as unnecessary. The results are recorded, and the search then receives them one by one
as it requests them. The goal is met if the plan that it finds is within 5 % of the best of the complete space, by the
measure of the search's goal.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import Slice
from forerun.planner.compile.compiler import CompilerFailure, verdict
from forerun.planner.search.space import MANY_COPIES, SPLIT, Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import GOALS, Goal, Outcome, Strategy, TimeAndCost
from forerun.resolve.resolved_job import ResolvedJob

RESULTS = Path(__file__).resolve().parent / "results" / "search_quality.json"
WITHIN = 1.05
AT_ONCE = 2


@dataclass(frozen=True)
class Task:
    name: str
    on: str
    job: dict[str, Any]

    def space(self) -> Space:
        job = Job.model_validate({"name": self.name, "data": "text", "steps": 1000, **self.job})
        return space_of(ResolvedJob(job), self.on, Bounds(usd_per_hour, needs_price=True))


TASKS = (
    Task(
        "small-on-four-chips",
        "v5e-4",
        {"model": {"layers": 4, "embed": 1024, "heads": 8, "vocab": 32_000}, "sequence": 1024, "batch": 4},
    ),
    Task("llama3.1-8b", "v6e-8", {"model": "llama3.1-8b", "sequence": 8192, "batch": 24}),
    Task("qwen3-0.6b", "v6e-1,v6e-4", {"model": "qwen3-0.6b", "sequence": 2048, "batch": 8}),
)


def usd_per_hour(one: Slice) -> float | None:
    price = cheapest(one.chip.name, hosts=one.hosts)
    return None if price is None else price.usd_per_chip_hour_on_demand * one.chips


def main() -> int:
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tasks": {}}
    record["date"] = datetime.now(UTC).date().isoformat()
    record["versions"] = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    for task in TASKS:
        space = task.space()
        entry = record["tasks"].setdefault(task.name, {"on": task.on, "job": task.job, "answers": {}})
        missing = [one for one in possible_candidates(space) if str(one) not in entry["answers"]]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for n, (one, answer) in enumerate(zip(missing, pool.map(partial(compiled, space), missing), strict=True)):
                entry["answers"][str(one)] = answer
                print(f"{task.name} {n + 1}/{len(missing)} {one}: {answer}", flush=True)
                RESULTS.write_text(json.dumps(record, indent=2) + "\n")
        entry["space"] = {"size": space.size, "left": len(space.candidates), "ruled_out": dict(space.ruled_out)}
        entry["search"] = {goal: searched(space, goal, entry["answers"]) for goal in GOALS}
        RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    for name, entry in record["tasks"].items():
        for goal, result in entry["search"].items():
            print(f"{name:14} {goal:9} {result['ratio']:.3f} of the best, {result['asked']} of {result['of']} compiled")
    met = all(result["ratio"] <= WITHIN for entry in record["tasks"].values() for result in entry["search"].values())
    return 0 if met else 1


def possible_candidates(space: Space) -> list[Candidate]:
    """Return all candidates that might fit, including those that the search skips as unnecessary."""
    needless = [one for one, why in space.dropped.items() if why in (SPLIT, MANY_COPIES)]
    return [*space.candidates, *needless]


def compiled(space: Space, one: Candidate) -> dict[str, Any]:
    try:
        answer = verdict(one.question(space.resolved), threading.Event())
    except CompilerFailure as failure:
        return {"failure": str(failure).splitlines()[0][:200]}
    seconds = answer.step.mid_seconds if answer.step else None
    return {"step_seconds": seconds, "peak_bytes": int(answer.memory.peak_bytes)}


def searched(space: Space, goal: Goal, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run the strategy on recorded results, one request after the other, and compare its choice with the best."""
    rates = {name: usd_per_hour(group[0].slice) for name, group in space.by_slice.items()}
    strategy = Strategy(space, goal, {name: None if rate is None else rate / 3600 for name, rate in rates.items()})
    told = {
        one: Outcome(answers[str(one)].get("step_seconds"), answers[str(one)].get("peak_bytes"))
        for one in possible_candidates(space)
    }
    known: dict[Candidate, Outcome] = {}
    order = []
    while (one := strategy.next(known)) is not None:
        known[one] = told[one]
        order.append(str(one))

    def best(outcomes: dict[Candidate, Outcome]) -> tuple[float, Candidate, TimeAndCost]:
        fitting = [(one, strategy.standing(one, o.seconds)) for one, o in outcomes.items() if o.seconds is not None]
        winner, standing = min(fitting, key=lambda pair: pair[1].score(goal))
        return standing.score(goal), winner, standing

    found, ideal = best(known), best(told)
    ratio = found[0] / ideal[0]
    return {
        "ratio": round(ratio**0.5 if goal == "balanced" else ratio, 4),
        "found": str(found[1]),
        "best": str(ideal[1]),
        "asked": len(known),
        "of": len(told),
        "order": order,
    }


if __name__ == "__main__":
    sys.exit(main())
