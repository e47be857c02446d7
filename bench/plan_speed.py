"""Time `forerun plan` and `forerun check`: new processes from their start to their exit.

python bench/plan_speed.py                    # two or three minutes; needs the extra `plan`, no TPU
python bench/plan_speed.py --repeat 3 --only 0.6b-cold check

Each row has the wall time and the CPU seconds of all processes that did its work. CPU time divided by the cores is a
lower bound of the time on idle cores, also if this machine was busy. The rows are appended to
bench/results/plan_speed.jsonl with the load of the machine.

The cache of results is not used, except for the row `stored`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_speed.jsonl"
EIGHT_SLICES = "v5e-4,v5e-8,v5e-16,v5p-8,v5p-16,v6e-4,v6e-8,v6e-16"


@dataclass(frozen=True)
class SpeedTarget:
    """A command, and its limit in seconds on two idle cores."""

    name: str
    job: str
    words: tuple[str, ...]
    limit_seconds: float
    is_repeated: bool = False  # the second of two equal commands is timed


TARGETS = (
    SpeedTarget("0.6b", "qwen3-0.6b", ("plan", "--on", "v5e-8", "--no-cache"), 7.0),
    SpeedTarget("8b", "llama3.1-8b", ("plan", "--on", "v5p-16", "--no-cache"), 9.0),
    SpeedTarget("eight-slices", "qwen3-0.6b", ("plan", "--on", EIGHT_SLICES, "--no-cache"), 25.0),
    SpeedTarget("stored", "qwen3-0.6b", ("plan", "--on", "v5e-8"), 1.2, is_repeated=True),
    SpeedTarget("check-first", "qwen3-0.6b", ("check",), 2.5),
    SpeedTarget("check", "qwen3-0.6b", ("check",), 1.0, is_repeated=True),
)


def timed(target: SpeedTarget) -> dict[str, Any]:
    """Run the command of a target in a new cache folder, and return its times."""
    with tempfile.TemporaryDirectory(prefix="fr-") as folder:
        env = os.environ | {"XDG_CACHE_HOME": folder}
        if target.is_repeated:
            _run(target, env)
        return _run(target, env)


def _run(target: SpeedTarget, env: dict[str, str]) -> dict[str, Any]:
    command, *options = target.words
    words = [sys.executable, "-P", "-m", "forerun", command, str(HERE / "jobs" / f"{target.job}.yaml"), *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}


def main() -> int:
    """Run the targets, append the results, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each target; the fastest one counts")
    parser.add_argument("--only", nargs="*", choices=[one.name for one in TARGETS], help="some of the targets")
    parser.add_argument("--note", default="", help="text for the rows, such as the state of the code")
    args = parser.parse_args()
    is_met = True
    for target in TARGETS:
        if args.only and target.name not in args.only:
            continue
        best = min((timed(target) for _ in range(args.repeat)), key=lambda row: row["seconds"])
        row = {
            "target": target.name,
            **best,
            "limit_seconds": target.limit_seconds,
            "met": best["seconds"] <= target.limit_seconds,
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": sys.version.split()[0],
            "jax": version("jax"),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "note": args.note,
        }
        is_met &= row["met"]
        print(json.dumps(row), flush=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
