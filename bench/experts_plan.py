"""Plan a model with experts on three slices, with LoRA and with all weights, and record memory, step time and cost.

python bench/experts_plan.py                # 6 compiles of several minutes; needs libtpu, no TPU
python bench/experts_plan.py lora-qwen3     # only jobs with this in their name; the other rows stay as they were
python bench/experts_plan.py lora- v6e-8    # only this slice
python bench/experts_plan.py --table        # only write the table in docs/explanation/experts.md again

The results are in `results/experts_plan.json`. A named size has random weights, so a plan reads no files.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from new_families_plan import HERE, planned, table

RESULTS = HERE / "results" / "experts_plan.json"
PAGE = HERE.parent / "docs" / "explanation" / "experts.md"
JOBS = ("lora-qwen3-30b-a3b", "qwen3-30b-a3b")
SLICES = ("v6e-8", "v6e-32", "v5e-64")
START, END = "<!-- plans: start -->\n", "<!-- plans: end -->\n"


def main(part: str = "", only: str = "") -> int:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["plans"] if RESULTS.exists() else []
    known = {(row["job"], row["slice"]): row for row in rows}
    wanted = [(job, on) for job in JOBS for on in SLICES]
    for job, on in wanted if part != "--table" else []:
        if job.startswith(part) and only in ("", on):
            print(f"{job} on {on}", file=sys.stderr, flush=True)
            known[job, on] = planned(job, on)
            _record([known[key] for key in wanted if key in known])
    rows = [known[key] for key in wanted if key in known]
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")
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
    sys.exit(main(*sys.argv[1:3]))
