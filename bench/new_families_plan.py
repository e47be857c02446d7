"""Plan Qwen3.5 and Gemma 4 on three slices, with LoRA and with all weights, and record memory, step time and cost.

python bench/new_families_plan.py                # 24 compiles of several minutes; needs libtpu, no TPU
python bench/new_families_plan.py lora-qwen3.5   # only jobs with this in their name; the other rows stay as they were
python bench/new_families_plan.py --table        # only write the table in docs/reference/plan-details.md again

The jobs in `jobs` name the folders in `configs`, which have only the published config.json: a plan reads no weights.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.units import GIB
from forerun.verbs.plan import plan

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "new_families_plan.json"
PAGE = HERE.parent / "docs" / "reference" / "plan-details.md"
MODELS = ("qwen3.5-4b", "qwen3.5-27b", "gemma-4-e4b", "gemma-4-31b")
JOBS = tuple(f"{method}{model}" for model in MODELS for method in ("lora-", ""))
SLICES = ("v5e-8", "v6e-8", "v6e-32")
KEPT = (
    "fits", "hbm_peak_bytes", "hbm_limit_bytes", "host_bytes", "mesh", "program", "step_seconds", "tokens_per_second",
    "mfu", "hours", "cost_usd", "compile_seconds", "error",
)  # fmt: skip
START, END = "<!-- new families: start -->\n", "<!-- new families: end -->\n"


def planned(job: str, on: str) -> dict[str, Any]:
    """Return the plan of a job on one slice. An error is recorded with its code in place of the values."""
    try:
        rows = plan(HERE / "jobs" / f"{job}.yaml", on=[on], progress=False).rows
    except UserError as error:
        return {"job": job, "slice": on, "fits": False, "error": f"{error.code}: {error.what}"}
    return {"job": job, "slice": on, **{key: rows[0].get(key) for key in KEPT}}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: memory, step time and cost, or the memory that a job needs."""
    lines = [
        "| job | slice | mesh | peak GiB | usable | step | $ on demand | $ spot |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        start = f"| {row['job']} | {row['slice']} "
        if row.get("hbm_peak_bytes") is None:
            lines.append(f"{start}| - | - | - | {row['error']} | - | - |")
            continue
        sizes = f"| {row['mesh']} | {row['hbm_peak_bytes'] / GIB:.2f} | {row['hbm_limit_bytes'] / GIB:.2f} "
        if not row["fits"]:
            lines.append(f"{start}{sizes}| does not fit | - | - |")
            continue
        cost = row["cost_usd"] or {}
        dollars = [f"{cost[kind]:,.2f}" if cost.get(kind) is not None else "-" for kind in ("on_demand", "spot")]
        lines.append(f"{start}{sizes}| {row['step_seconds']['mid']:.2f} s | {dollars[0]} | {dollars[1]} |")
    return "\n".join(lines) + "\n"


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the table between its two marks in the docs."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")


def main(part: str = "") -> int:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["plans"] if RESULTS.exists() else []
    known = {(row["job"], row["slice"]): row for row in rows}
    if part != "--table":
        for job in (job for job in JOBS if part in job):
            for on in SLICES:
                print(f"{job} on {on}", file=sys.stderr, flush=True)
                known[job, on] = planned(job, on)
                _record([known[key] for job in JOBS for on in SLICES if (key := (job, on)) in known])
    rows = [known[key] for job in JOBS for on in SLICES if (key := (job, on)) in known]
    write_page(rows)
    print(table(rows))
    return 0


def _record(rows: list[dict[str, Any]]) -> None:
    """Write all rows. This happens after every plan, because a plan takes minutes."""
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "plans": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
