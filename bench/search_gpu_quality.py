"""Quality of the search over TPUs and GPUs: its best plan compared with the best of all compiled candidates.

python bench/search_gpu_quality.py --programs FOLDER     # half an hour on two cores; needs the extras plan and plan-gpu

Every candidate of one space is compiled. The results are recorded, and the search then receives them one by one as it
requests them. It must find the same best plan as the ranking of all candidates. FOLDER keeps the results and the
scheduled programs: an interrupted run continues there, and after a change of the step-time model, `--again` computes
all times again without compiling.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import pickle
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from search_quality import possible_candidates

from forerun.config.schema import Job
from forerun.planner.compile.compiler import CompilerFailure, verdict
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.hlo import Module
from forerun.planner.search.outcome import Exploration
from forerun.planner.search.ranking import RankedPlan, ranked
from forerun.planner.search.search import price_bounds, strategy_of
from forerun.planner.search.space import Candidate, Space, space_of
from forerun.planner.search.strategy import GOALS, Goal
from forerun.planner.time.prediction import step_time
from forerun.resolve.resolved_job import ResolvedJob

RESULTS = Path(__file__).resolve().parent / "results" / "search_gpu.json"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
ON = "v5e-1,v6e-1,h100-1,4090-1"
JOB = {"model": "qwen3-0.6b", "sequence": 2048, "batch": 4, "steps": 20_000}
AT_ONCE = 2
TARIFF = Tariff()

Answer = FitResult | str  # a string is the compiler's failure


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=Path, required=True, metavar="FOLDER", help="keeps results and programs")
    parser.add_argument("--again", action="store_true", help="compute the times of kept programs again")
    args = parser.parse_args()
    args.programs.mkdir(parents=True, exist_ok=True)
    space = whole_space()
    candidates = possible_candidates(space)
    answers: dict[Candidate, Answer] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = pool.map(lambda one: (one, answer_of(space, one, args.programs, again=args.again)), candidates)
        for n, (one, answer) in enumerate(done):
            answers[one] = answer
            print(f"{n + 1}/{len(candidates)} {one}: {as_text(answer)}", flush=True)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "job": JOB,
        "on": ON,
        "prices": {name: price_text(group[0]) for name, group in space.by_slice.items()},
        "space": {"size": space.size, "left": len(space.candidates), "ruled_out": dict(space.ruled_out)},
        "compile_seconds": round(sum(one.compile_seconds for one in answers.values() if isinstance(one, FitResult))),
        "search": {goal: searched(space, goal, answers) for goal in GOALS},
        "answers": {str(one): as_record(answer) for one, answer in answers.items()},
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(record))
    print(markdown(record))
    return 0 if all(result["same"] for result in record["search"].values()) else 1


def whole_space() -> Space:
    job = Job.model_validate({"name": "search-gpu", "data": "text", **JOB})
    return space_of(ResolvedJob(job), ON, price_bounds(TARIFF, needs_price=True))


def answer_of(space: Space, one: Candidate, folder: Path, *, again: bool) -> Answer:
    """Return the kept result of a candidate, with a new time if `again` is set; compile it if there is none."""
    path = folder / f"{str(one).replace(' ', '_').replace(',', '')}.pickle.xz"
    if path.exists():
        answer, module = read(path)
        if again and module is not None and isinstance(answer, FitResult):
            answer = with_new_time(answer, module)
            write(path, answer, module)
        return answer
    try:
        result = verdict(one.question(space.resolved))
    except CompilerFailure as failure:
        answer = str(failure).splitlines()[0][:200]
        write(path, answer, None)
        return answer
    answer = replace(result, module=None)
    write(path, answer, result.module)
    return answer


def read(path: Path) -> tuple[Answer, Module | None]:
    kept: tuple[Answer, Module | None] = pickle.loads(lzma.decompress(path.read_bytes()))
    return kept


def write(path: Path, answer: Answer, module: Module | None) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(lzma.compress(pickle.dumps((answer, module)), preset=0))
    os.replace(draft, path)


def with_new_time(answer: FitResult, module: Module) -> FitResult:
    question = answer.question
    on, flops = question.slice, answer.flops_per_step / question.devices
    return replace(answer, step=step_time(module, on, flops, False))


def searched(space: Space, goal: Goal, answers: Mapping[Candidate, Answer]) -> dict[str, Any]:
    """Run the strategy on the results, one request after the other, and compare its best plan with that of all."""
    strategy, found = strategy_of(space, goal, TARIFF), Exploration()
    began = time.perf_counter()
    order = []
    while (one := strategy.next(found.known)) is not None:
        order.append(str(one))
        answer = answers[one]
        if isinstance(answer, str):
            found.failures[one] = answer
        else:
            found.verdicts[one] = answer
    seconds = time.perf_counter() - began
    every = {one: answer for one, answer in answers.items() if isinstance(answer, FitResult)}
    best, ideal = ranked(found.verdicts, goal, TARIFF)[0], ranked(every, goal, TARIFF)[0]
    return {
        "same": best.candidate == ideal.candidate,
        "found": as_plan(best),
        "best": as_plan(ideal),
        "compiled": len(order),
        "of": len(answers),
        "seconds_to_decide": round(seconds, 2),
        "slices": {name: best_of_slice(every, goal, name) for name in space.by_slice},
        "order": order,
    }


def best_of_slice(every: Mapping[Candidate, FitResult], goal: Goal, name: str) -> dict[str, Any] | None:
    own = ranked({one: answer for one, answer in every.items() if one.slice.name == name}, goal, TARIFF)
    return as_plan(own[0]) if own else None


def as_plan(one: RankedPlan) -> dict[str, Any]:
    usd = None if one.usd is None else round(one.usd, 2)
    return {
        "plan": str(one.candidate),
        "step_seconds": round(one.step_seconds, 5),
        "hours": round(one.hours, 3),
        "usd": usd,
    }


def price_text(one: Candidate) -> str:
    price = TARIFF.price_of(one.slice)
    if price is None:
        return "unknown"
    return f"{price.usd_per_chip_hour_on_demand * one.slice.chips:.2f} USD/h, {price.provider}, {price.date}"


def as_text(answer: Answer) -> str:
    if isinstance(answer, str):
        return f"failed: {answer}"
    step = "does not fit" if answer.step is None else f"{answer.step.mid_seconds:.4g} s a step"
    return f"{step}, peak {answer.memory.peak_bytes}, {answer.compile_seconds}"


def as_record(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"failure": answer}
    seconds = None if answer.step is None else answer.step.mid_seconds
    return {"step_seconds": seconds, "peak_bytes": int(answer.memory.peak_bytes)}


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page: what the search found for each goal, and the best plan of each slice."""
    fit = sum(answer.get("step_seconds") is not None for answer in record["answers"].values())
    job = ", ".join(f"{name} {value}" for name, value in record["job"].items())
    lines = [
        "# The search over TPUs and GPUs against all candidates",
        "",
        f"`python bench/search_gpu_quality.py --programs FOLDER`, {record['date']}. Job: {job}. "
        f"{len(record['answers'])} candidates were compiled on {record['on'].replace(',', ', ')}; {fit} of them fit. "
        f"The compiles took {record['compile_seconds'] / 60:.0f} minutes in total, with other work on the machine. "
        "Step times are predictions; nothing ran on a TPU or GPU.",
        "",
        "| goal | compiled by the search | found | best of all candidates | same |",
        "| --- | --- | --- | --- | --- |",
    ]
    for goal, result in record["search"].items():
        cells = (f"{result['compiled']} of {result['of']}", result["found"]["plan"], result["best"]["plan"])
        lines.append(f"| {goal} | {' | '.join(cells)} | {'yes' if result['same'] else 'no'} |")
    lines += [
        "",
        "The cheapest plan of each slice, of all candidates:",
        "",
        "| slice | price | plan | step (ms) | hours | USD |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, best in record["search"]["cheapest"]["slices"].items():
        if best is None:
            lines.append(f"| {name} | {record['prices'][name]} | nothing fits | | | |")
            continue
        plan = best["plan"].removeprefix(f"{name} ")
        figures = f"{best['step_seconds'] * 1e3:.1f} | {best['hours']:.2f} | {best['usd']:.2f}"
        lines.append(f"| {name} | {record['prices'][name]} | {plan} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
