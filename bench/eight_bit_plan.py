"""Plan llama3.1-8b with products of 8 bits and without, and write the table of docs/how-to/eight-bit.md.

    python bench/eight_bit_plan.py             # all rows; needs libtpu and jax's CUDA plugin, no TPU and no GPU
    python bench/eight_bit_plan.py v6e-8       # only rows of this slice; the other rows stay
    python bench/eight_bit_plan.py --table     # only write the table again

Writes bench/results/eight_bit_plan.json after each row.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.units import GIB
from forerun.verbs.plan import plan

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results/eight_bit_plan.json"
PAGE = ROOT.parent / "docs/how-to/eight-bit.md"
START, END = "<!-- eight bit plans: start -->\n", "<!-- eight bit plans: end -->\n"
# The format, the slice and the other overrides of bench/jobs/llama3.1-8b.yaml.
KEEP = "remat={policy: named, keep: [attention_out], offload: [layer_in]}"
SHORT = ("sequence=2048", "batch=96", "micro_batch=12")
ROWS = (
    ("int8", "v6e-8", ()),
    ("int8", "v6e-8", (KEEP,)),
    ("int8", "v6e-8", SHORT),
    ("int8", "v6e-8", (KEEP, *SHORT)),
    ("fp8", "h100-8", ("micro_batch=1",)),
    ("int8", "v5e-32", ("batch=32", "micro_batch=1")),
    ("fp8", "tpu7x-2x2x1", ()),
)
KEPT = (
    "fits", "hbm_peak_bytes", "mesh", "program", "step_seconds", "time_breakdown", "tokens_per_second", "chips",
    "cost_usd",
)  # fmt: skip


def planned(on: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    job = load(ROOT / "jobs/llama3.1-8b.yaml", list(overrides)).job
    [found] = plan(job, on=[on], progress=False).rows
    return {key: found.get(key) for key in KEPT}


def table(rows: dict[str, Any]) -> str:
    """Return the Markdown table of all rows."""
    lines = [
        "| slice | overrides | peak GiB | bfloat16 | 8 bits | faster | matmuls | memory-bound | $ for 1,000 steps |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, row in rows.items():
        before, after = row["bfloat16"], row[row["format"]]
        if not (before["fits"] and after["fits"]):
            continue

        def both(name: str, before: Any = before, after: Any = after) -> str:
            return f"{before['time_breakdown'][name]:.2f} to {after['time_breakdown'][name]:.2f} s"

        steps = before["step_seconds"]["mid"], after["step_seconds"]["mid"]
        words = " ".join((f"precision.matmul={row['format']}", *row["overrides"]))
        peaks = f"{before['hbm_peak_bytes'] / GIB:.1f} to {after['hbm_peak_bytes'] / GIB:.1f}"
        money = [one["cost_usd"].get("on_demand") if one["cost_usd"] else None for one in (before, after)]
        cost = " to ".join("-" if usd is None else f"{usd:.2f}" for usd in money)
        lines.append(
            f"| {key.split()[0]} | `{words}` | {peaks} | {steps[0]:.3f} s | {steps[1]:.3f} s "
            f"| {steps[0] / steps[1]:.2f} | {both('matmul')} | {both('memory_bound_rest')} | {cost} |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    for form, on, overrides in ROWS if words != ["--table"] else ():
        if words and on not in words:
            continue
        row: dict[str, Any] = {"format": form, "overrides": list(overrides)}
        for name, more in (("bfloat16", ()), (form, (f"precision.matmul={form}",))):
            row[name] = planned(on, (*overrides, *more))
            print(on, name, row[name]["fits"], row[name]["step_seconds"], row[name]["time_breakdown"], flush=True)
        known["rows"][" ".join((on, *overrides))] = row
        known["date"] = datetime.now(UTC).date().isoformat()
        known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    text = PAGE.read_text("utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table(known['rows'])}\n\n{END}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
