"""Plan the jobs whose program was made faster for a generation of chips, and record memory, step time and cost.

python bench/best_program.py                  # all rows, some minutes; needs libtpu, no TPU
python bench/best_program.py llama3.1-8b      # only rows of this job or slice; the other rows stay
python bench/best_program.py --table          # only write the table of docs/scale.md again
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scale import PAGE, Row, planned

from forerun.units import GIB

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "best_program.json"
KEEP = "remat={policy: named, keep: [attention_out], offload: [layer_in]}"
# Rows with the earlier choice of one part.
BEFORE = "compiler_options.xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=null"
ROWS = (
    Row("best", "llama3.1-8b", "v6e-8", (KEEP,)),
    Row("best", "llama3.1-8b", "v6e-8", (KEEP, "loss_chunk=256")),
    Row("best", "llama3.1-8b", "v6e-8", (KEEP, BEFORE)),
    Row("best", "llama3.1-8b", "v6e-8", ()),
    Row("best", "llama3.1-70b", "v6e-256", ()),
    Row("best", "qwen3-0.6b", "v5e-8", ("remat=none", "unroll=true")),
    Row("best", "qwen3-0.6b", "v5e-8", ("remat=none", "unroll=true", "loss_chunk=128")),
    Row("best", "smollm2-135m", "v5e-1", ("remat=none", "unroll=true")),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, with the parts of the step."""
    lines = [
        "| job | slice | overrides | peak GiB | step | tokens/s per chip | matmuls | attention | exposed | rest |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        start = f"| {row['job']} | {row['slice']} | {' '.join(f'`{one}`' for one in row['overrides']) or '-'} "
        if not row["fits"]:
            lines.append(f"{start}| - | {row.get('error') or 'does not fit'} | - | - | - | - | - |")
            continue
        parts = row["time_breakdown"]
        exposed = sum(parts.get(name, 0.0) for name in ("collectives_not_hidden", "host_transfers_not_hidden"))
        figures = (parts["matmul"], parts["attention"], exposed, parts["memory_bound_rest"])
        lines.append(
            f"{start}| {row['hbm_peak_bytes'] / GIB:.2f} of {row['hbm_limit_bytes'] / GIB:.2f} "
            f"| {row['step_seconds']['mid']:.3f} s | {row['tokens_per_second'] / row['chips']:,.0f} | "
            + " | ".join(f"{one:.3f} s" for one in figures)
            + " |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Plan the chosen rows, write the results after each, and write the table."""
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    if words != ["--table"]:
        for row in ROWS:
            if not set(words) <= {row.job, row.on}:
                continue
            known["rows"][row.key] = found = planned(row)
            print(row.key, found.get("error") or (found["step_seconds"] or {}).get("mid"), flush=True)
            known["date"] = datetime.now(UTC).date().isoformat()
            known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
            known["rows"] = {one.key: known["rows"][one.key] for one in ROWS if one.key in known["rows"]}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    text = PAGE.read_text("utf-8")
    start, end = "<!-- best program: start -->\n", "<!-- best program: end -->\n"
    before, _, rest = text.partition(start)
    _, mark, after = rest.partition(end)
    if mark:
        PAGE.write_text(f"{before}{start}\n{table(list(known['rows'].values()))}\n\n{end}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
