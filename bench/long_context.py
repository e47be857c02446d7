"""Plan llama3.1-8b with split sequences of 131,072 and 1,048,576 tokens, and record memory, step time and cost.

python bench/long_context.py                        # eight compiles of several minutes; needs libtpu, no TPU
python bench/long_context.py lora-llama3.1-8b-131k  # only this job; the other rows stay as they were
python bench/long_context.py --table                # only write the table in docs/how-to/long-context.md again
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
RESULTS = HERE / "results" / "long_context.json"
PAGE = HERE.parent / "docs" / "how-to" / "long-context.md"
PLANS = tuple(
    (f"{method}llama3.1-8b-{length}", on)
    for length, slices in (("131k", ("v6e-16", "v5p-32")), ("1m", ("v5p-256",)))
    for method in ("lora-", "")
    for on in slices
)
KEPT = (
    "fits", "hbm_peak_bytes", "hbm_limit_bytes", "mesh", "program", "step_seconds", "tokens_per_second", "mfu", "hours",
    "cost_usd", "compile_seconds", "attention", "error",
)  # fmt: skip
START, END = "<!-- long context: start -->\n", "<!-- long context: end -->\n"


def planned(job: str, on: str) -> dict[str, Any]:
    """Return the plan of a job on one slice. An error is recorded with its code in place of the values."""
    try:
        rows = plan(HERE / "jobs" / f"{job}.yaml", on=[on], progress=False).rows
    except UserError as error:
        return {"job": job, "slice": on, "fits": False, "error": f"{error.code}: {error.what}"}
    return {"job": job, "slice": on, **{key: rows[0].get(key) for key in KEPT}}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: memory, step time and speed, or the memory that a job needs."""
    lines = [
        "| job | slice | mesh | peak GiB | usable | step | tokens/s | MFU |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        start = f"| {row['job']} | {row['slice']} "
        if row.get("hbm_peak_bytes") is None:
            lines.append(f"{start}| - | - | - | {row['error']} | - | - |")
            continue
        sizes = f"| {row['mesh']} | {row['hbm_peak_bytes'] / GIB:.2f} | {row['hbm_limit_bytes'] / GIB:.2f} "
        if not row["fits"] or row["step_seconds"] is None:
            lines.append(f"{start}{sizes}| does not fit | - | - |")
            continue
        speed = f"{row['tokens_per_second']:,.0f} | {100 * row['mfu']:.0f} %"
        lines.append(f"{start}{sizes}| {row['step_seconds']['mid']:.1f} s | {speed} |")
    return "\n".join(lines) + "\n"


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the table between its two marks in the docs."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")


def main(part: str = "") -> int:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["plans"] if RESULTS.exists() else []
    known = {(row["job"], row["slice"]): row for row in rows}
    for job, on in PLANS if part != "--table" else ():
        if part in ("", job, f"{job}@{on}"):
            print(f"{job} on {on}", file=sys.stderr, flush=True)
            known[job, on] = planned(job, on)
            _record([known[key] for key in PLANS if key in known])
    rows = [known[key] for key in PLANS if key in known]
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
