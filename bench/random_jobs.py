"""Plan random job files with the TPU compiler, as `forerun plan FILE --on SLICE` does, and record the outcomes.

python bench/random_jobs.py --count 40 --seed 0     # about 15 s per job on two cores; needs libtpu, no TPU
python bench/random_jobs.py --no-compiler --count 1000      # all of `plan` except the compiler, about a minute

Even seeds are small valid jobs. Odd seeds are any jobs without a mistake in the file, of up to 70B parameters. The
outcome of each is fits, does not fit, refused, no answer (within ten minutes), or crash; a crash is a bug of forerun.
Recorded seeds are not planned again. With --no-compiler, each file goes through the checks of
tests/unit/planner/search/job_trials.py; CI does this for the first 200 seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "random_jobs.json"
PLANS = HERE / "results" / "random_plans.json"
TIMEOUT_SECONDS = 600
sys.path.append(str(ROOT / "tests" / "unit" / "planner" / "search"))

from job_files import DATA, DATA_TEXT, SMALL_SLICES, JobFile, job_file, small_file  # noqa: E402
from job_trials import Trial, normalised, read_and_planned  # noqa: E402


def sample(seed: int) -> tuple[JobFile, str]:
    """Return the job file of a seed and the slice that it is planned for."""
    if seed % 2 == 0:
        small = small_file(seed)
        return small, small.on
    offset = seed
    while (file := job_file(offset)).mistakes:
        offset += 1_000_000
    return file, SMALL_SLICES[seed // 2 % len(SMALL_SLICES)]


def planned(seed: int, folder: Path) -> dict[str, Any]:
    file, slice_name = sample(seed)
    (folder / DATA).write_text(DATA_TEXT)
    path = folder / f"job-{seed}.yaml"
    path.write_text(file.text, "utf-8")
    command = [sys.executable, "-m", "forerun", "plan", path.name, *file.overrides]
    command += ["--on", slice_name, "--json", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    started = time.monotonic()
    row: dict[str, Any] = {"seed": seed, "slice": slice_name}
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", cwd=folder, env=env, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return row | {"outcome": "no answer", "said": f"within {TIMEOUT_SECONDS} s", "job": file.text}
    row |= judged(done)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row | ({"job": file.text} if row["outcome"] == "crash" else {})


def judged(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the outcome of a plan, with its figures or its error message."""
    said = done.stderr.strip()
    rows = json.loads(done.stdout)["slices"] if done.stdout.strip() else []
    if rows:
        ledger = sum(size for name, size in rows[0]["hbm_ledger"].items() if name != "host_offloaded")
        if ledger != rows[0]["hbm_peak_bytes"]:
            return {"outcome": "crash", "said": f"the ledger has {ledger} of {rows[0]['hbm_peak_bytes']} bytes"}
    if done.returncode == 0 and rows and rows[0]["fits"]:
        return {
            "outcome": "fits",
            "peak_bytes": rows[0]["hbm_peak_bytes"],
            "step_seconds": rows[0]["step_seconds"]["mid"],
        }
    told = all(f"{word}: " in said for word in ("error", "  why", "  fix"))
    if done.returncode != 2 or not told:
        return {"outcome": "crash", "said": said[-2000:]}
    return {"outcome": "does not fit" if rows else "refused", "said": said}


def plan_without_compiler(seeds: range) -> int:
    """Plan the files of these seeds, record the counts, and return the exit code."""
    failed: dict[int, str] = {}
    trials = []
    with tempfile.TemporaryDirectory(prefix="forerun-random-jobs-") as name:
        for seed in seeds:
            try:
                trials += read_and_planned(range(seed, seed + 1), Path(name), Trial.run)
            except AssertionError as error:
                failed[seed] = str(error)
                print(error, file=sys.stderr, flush=True)
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "first_seed": seeds.start,
        "files": len(seeds),
        "planned": sum(trial.planned for trial in trials),
        "only_refused": sum(not trial.planned and bool(trial.refusals) for trial in trials),
        "different_refusals": len({normalised(error) for trial in trials for error in trial.refusals}),
        "failed": failed,
    }
    PLANS.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps({**content, "failed": len(failed)}))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--no-compiler", action="store_true", help="check all of `plan` except the compiler")
    args = parser.parse_args()
    if args.no_compiler:
        return plan_without_compiler(range(args.seed, args.seed + args.count))
    rows = {row["seed"]: row for row in json.loads(RESULTS.read_text())["jobs"]} if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="forerun-random-jobs-") as name:
        for seed in range(args.seed, args.seed + args.count):
            if seed in rows:
                continue
            rows[seed] = planned(seed, Path(name))
            print(f"{seed}: {rows[seed]['outcome']} on {rows[seed]['slice']}", file=sys.stderr, flush=True)
            record(rows)
    counts = record(rows)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return 1 if counts["crash"] else 0


def record(rows: dict[int, dict[str, Any]]) -> Counter[str]:
    counts = Counter({"fits": 0, "does not fit": 0, "refused": 0, "crash": 0})
    counts.update(row["outcome"] for row in rows.values())
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "outcomes": dict(counts),
        "crashed_seeds": sorted(seed for seed, row in rows.items() if row["outcome"] == "crash"),
        "jobs": [rows[seed] for seed in sorted(rows)],
    }
    draft = RESULTS.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    draft.rename(RESULTS)
    return counts


if __name__ == "__main__":
    sys.exit(main())
