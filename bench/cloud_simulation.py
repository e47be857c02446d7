"""Simulated cloud runs: random faults of the record, the API, the bucket, the clocks, the hosts and the controllers.

    python bench/cloud_simulation.py                     # 20,000 seeds
    python bench/cloud_simulation.py --seed 4711 -v      # one seed, with its events
    python bench/cloud_simulation.py --reverts           # the first seed that finds each defect that was fixed
    python bench/cloud_simulation.py --revert forged-lease

Each seed is one simulation of tests/cloud/simulation, which describes what is real and what is simulated. Its checks
are: no machine lives longer than its deadline or the cap allow plus one poll, `forerun down` always deletes, no
checkpoint is lost, two attempts never write at the same time, and no process ends because of a fault. A revert brings a
defect back that was fixed, to show that the simulation finds it. The results are in
bench/results/cloud_simulation.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cloud_simulation.jsonl"
sys.path[:0] = [str(HERE.parent / "tests" / "cloud")]

from simulation.reverts import REVERTS, reverted  # noqa: E402
from simulation.simulation import Result, simulate  # noqa: E402

CHUNK = 50  # seeds of one task
MOST_SEEDS = 5000  # in which a revert is searched for


def chunk(first: int, count: int) -> list[Result]:
    """Simulate some seeds. The traces of those without violations are dropped."""
    results = [simulate(seed) for seed in range(first, first + count)]
    for result in results:
        if not result.violations:
            result.trace = []
    return results


def results_of(first: int, count: int, workers: int) -> Iterator[Result]:
    """Yield the results in the order of their seeds."""
    starts = range(first, first + count, CHUNK)
    sizes = [min(CHUNK, first + count - start) for start in starts]
    if workers == 1:
        for start, size in zip(starts, sizes, strict=True):
            yield from chunk(start, size)
        return
    with ProcessPoolExecutor(workers) as pool:
        for results in pool.map(chunk, starts, sizes):
            yield from results


def until_interrupted(results: Iterator[Result]) -> Iterator[Result]:
    """Yield results until Ctrl-C, so that an interrupted campaign is recorded with fewer seeds."""
    with suppress(KeyboardInterrupt):
        yield from results


def campaign(first: int, count: int, workers: int) -> dict[str, Any]:
    """Simulate many seeds, print those with violations, and return the figures."""
    began = time.monotonic()
    failed: list[dict[str, Any]] = []
    ends: Counter[str] = Counter()
    limits: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    seeds_done = 0
    for seeds_done, result in enumerate(until_interrupted(results_of(first, count, workers)), 1):
        ends[result.end or "none"] += 1
        limits[result.guards] += 1
        faults.update(result.faults)
        totals.update(result.figures)
        if result.violations:
            failed.append({"seed": result.seed, "violations": result.violations})
            print(f"seed {result.seed}: {'; '.join(result.violations)}", flush=True)
        if seeds_done % 1000 == 0:
            print(f"{seeds_done} seeds, {len(failed)} with a violation, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "kind": "seeds",
        "first_seed": first,
        "seeds": seeds_done,
        "seeds_with_violations": len(failed),
        "failed": failed[:50],
        "limits": dict(sorted(limits.items())),
        "ends": dict(sorted(ends.items())),
        "faults": dict(sorted(faults.items())),
        **{name: round(value, 2) for name, value in sorted(totals.items())},
        "seconds": round(time.monotonic() - began),
        "workers": workers,
        "python": platform.python_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def first_seed(name: str, most: int) -> dict[str, Any]:
    """Return the first seed that finds a defect that was fixed."""
    revert = REVERTS[name]
    outcome: dict[str, Any] = {"kind": "revert", "name": name, "defect": revert.defect, "item": revert.item}
    with reverted(name):
        for seed in range(most):
            result = simulate(seed)
            if result.violations:
                return {**outcome, "first_seed": seed, "violation": result.violations[0]}
    return {**outcome, "first_seed": None, "violation": f"none in {most} seeds"}


def record(lines: list[dict[str, Any]]) -> None:
    """Replace the recorded lines of the same kind and name."""
    recorded = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []
    replaced = {(line["kind"], line.get("name")) for line in lines}
    unchanged = [line for line in recorded if (line["kind"], line.get("name")) not in replaced]
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in [*unchanged, *lines])
    RESULTS.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="simulate only this seed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the events of the seed")
    parser.add_argument("--revert", choices=sorted(REVERTS), help="bring a defect back")
    parser.add_argument("--reverts", action="store_true", help="search the first seed of every revert")
    parser.add_argument("--most", type=int, default=MOST_SEEDS, help="seeds in which a revert is searched for")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--no-results", action="store_true", help="do not write bench/results")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background processes ignore it
    if args.seed is not None:
        with reverted(args.revert):
            result = simulate(args.seed)
        print("\n".join([*(result.trace if args.verbose else ()), *(result.violations or ["no violation"])]))
        sys.exit(1 if result.violations else 0)
    if args.revert or args.reverts:
        lines = []
        for name in [args.revert] if args.revert else REVERTS:
            lines.append(first_seed(name, args.most))
            print(f"{name}: seed {lines[-1]['first_seed']}: {lines[-1]['violation']}", flush=True)
            if not args.no_results:
                record(lines[-1:])
    else:
        lines = [campaign(args.first, args.seeds, args.workers)]
        print(json.dumps({key: value for key, value in lines[0].items() if key != "failed"}, indent=1))
        if not args.no_results:
            record(lines)
    is_failed = lines[0].get("seeds_with_violations") or any(line.get("first_seed") is None for line in lines)
    sys.exit(1 if is_failed else 0)


if __name__ == "__main__":
    main()
