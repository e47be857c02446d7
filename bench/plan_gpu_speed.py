"""Time the memory verdict of GPU machines: a new process from its start to its exit, without the cache of results.

python bench/plan_gpu_speed.py            # about a minute; needs the extra `plan-gpu`, no GPU
python bench/plan_gpu_speed.py --repeat 3

CPU seconds are those of the command and of its compiler. On idle cores the wall time is about the sum of CPU seconds
minus what runs in parallel, so a busy machine can be recognized.
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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_gpu_speed.json"


@dataclass(frozen=True)
class Target:
    """A plan, and its limit in seconds on two idle cores."""

    job: str
    machine: str
    overrides: tuple[str, ...]
    limit_seconds: float


TARGETS = (
    Target("qwen3-0.6b", "h100-1", ("batch=4",), 15.0),
    Target("llama3.1-8b", "h100-8", ("sequence=4096", "batch=8", "micro_batch=1"), 30.0),
)


def timed(target: Target) -> dict[str, Any]:
    """Plan in a new process and return its times and its result."""
    command = [sys.executable, "-P", "-m", "forerun", "plan", str(HERE / "jobs" / f"{target.job}.yaml")]
    command += [*target.overrides, "--on", target.machine, "--no-cache", "--json"]
    with tempfile.TemporaryDirectory() as cache:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": cache}, check=False
        )
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout:
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout)["slices"][0]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_bytes": row["hbm_peak_bytes"]}


def main() -> int:
    """Run all targets, write the results, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="plans of each target; the fastest one counts")
    repeat = parser.parse_args().repeat
    rows = []
    for target in TARGETS:
        best = min((timed(target) for _ in range(repeat)), key=lambda row: row["seconds"])
        rows.append({**asdict(target), **best, "met": best["seconds"] <= target.limit_seconds})
        print(rows[-1], flush=True)
    key = f"jax-{version('jax')}"
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    load = round(os.getloadavg()[0], 1)
    known[key] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "load_average": load,
        "niceness": os.nice(0),
        "targets": rows,
    }
    RESULTS.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
