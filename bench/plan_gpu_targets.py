"""Plan three jobs on two TPU slices and four GPU machines, and record the results and the time that this takes.

python bench/plan_gpu_targets.py           # 18 compiles; needs the extras `plan` and `plan-gpu`, no TPU and no GPU
python bench/plan_gpu_targets.py --table   # only write the Markdown table again

Each job is planned with `forerun.plan`, as in `forerun plan JOB --on ... --no-cache`. The target is six
minutes on two cores. The CPU time of all compilers is recorded too, because it hardly depends on other programs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import textwrap
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.console import SafeConsole
from forerun.planner.report.formatting import hours_text, seconds_text, usd_text
from forerun.units import GIB
from forerun.verbs.job_files import load_job
from forerun.verbs.plan import plan

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_gpu_targets.json"
PLACES = ("v5e-8", "v6e-8", "h100-1", "h100-8", "a100-80-8", "4090-1")
TARGET_SECONDS = 360
# By name: the job file and overrides. The two 8B jobs have the same tokens per step.
JOBS = {
    "llama3.1-8b LoRA": ("lora-llama3.1-8b", ()),
    "llama3.1-8b full": ("llama3.1-8b", ("sequence=4096", "batch=32", "micro_batch=1")),
    "qwen3-0.6b full": ("qwen3-0.6b", ()),
}
KEPT = (
    *("slice", "platform", "fits", "mesh", "hbm_peak_bytes", "hbm_limit_bytes", "step_seconds", "tokens_per_second"),
    *("mfu", "limit", "uncertain", "hours", "cost_usd", "zone", "provider", "compile_seconds", "error"),
)


def cpu_seconds() -> float:
    """Return the user and system CPU seconds of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    load_before, started = os.getloadavg()[0], time.perf_counter()
    targets: list[dict[str, Any]] = []
    for name, (file, overrides) in JOBS.items():
        found = plan(load_job(HERE / "jobs" / f"{file}.yaml", *overrides), on=PLACES, use_cache=False)
        found.print(SafeConsole(width=120))
        print(flush=True)
        rows = {row["slice"]: row for row in found.rows}
        targets += [{"job": name, **{key: rows[place][key] for key in KEPT}} for place in PLACES]
    wall_seconds = time.perf_counter() - started
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "versions": {package: version(package) for package in packages},
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "plans": len(targets),
        "wall_seconds": round(wall_seconds, 1),
        "cpu_seconds": round(cpu_seconds(), 1),
        "target_seconds": TARGET_SECONDS,
        "targets": targets,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    write_page(record)
    return 0 if wall_seconds <= TARGET_SECONDS else 1


def write_page(record: dict[str, Any]) -> None:
    """Write the record as Markdown, which docs/gpu.md includes, and print it."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    idle = record["cpu_seconds"] / record["cores"]
    about = (
        f"`python bench/plan_gpu_targets.py`, {record['date']}, {versions}. {record['plans']} plans without the cache "
        f"took {record['wall_seconds']:.0f} s on {record['cores']} cores (target: {record['target_seconds']} s), at a "
        f"load of {record['load_before']} before the start. They used {record['cpu_seconds']:.0f} s of CPU time, so "
        f"{record['cores']} idle cores need at least {idle:.0f} s. Hours and dollars are of 1,000 steps, on "
        "demand at the cheapest provider. `~` marks uncertain times."
    )
    text = f"{textwrap.fill(about, 120, break_on_hyphens=False)}\n\n{table(record['targets'])}"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| job | on | fits | peak, GiB | usable | step | range | MFU | limit | hours | $ on demand | provider |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        peak, limit = row["hbm_peak_bytes"], row["hbm_limit_bytes"]
        if peak is None:
            lines.append(f"| {row['job']} | {row['slice']} | no | {row['error']['code']} |" + " |" * 8)
            continue
        cells = [row["job"], row["slice"], "yes" if row["fits"] else "no", f"{peak / GIB:.2f}", f"{limit / GIB:.2f}"]
        if step := row["step_seconds"]:
            usd, mark = row["cost_usd"]["on_demand"], "~" if row["uncertain"] else ""
            cells += [
                f"{mark}{seconds_text(step['mid'])}",
                f"{seconds_text(step['low'])} to {seconds_text(step['high'])}",
            ]
            cells += ["-" if row["mfu"] is None else f"{row['mfu']:.0%}", row["limit"], hours_text(row["hours"])]
            cells += ["-" if usd is None else usd_text(usd), row["provider"]["on_demand"] or "-"]
        else:
            cells += ["-"] * 7
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--table" in sys.argv[1:]:
        write_page(json.loads(RESULTS.read_text()))
        sys.exit(0)
    sys.exit(main())
