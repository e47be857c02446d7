"""Plan small models as docs/scale.md describes, and record memory, step time and cost.

python bench/scale.py              # all rows; needs libtpu, no TPU
python bench/scale.py unroll       # only rows of this part; a job and a slice may follow. The other rows stay
python bench/scale.py --table      # only write the tables of the page again
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.errors import UserError
from forerun.units import GIB
from forerun.verbs.plan import plan

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "scale.json"
PAGE = HERE.parent / "docs" / "scale.md"
KEPT = (
    "fits", "hbm_peak_bytes", "hbm_limit_bytes", "mesh", "chips", "program", "unroll", "step_seconds", "time_breakdown",
    "tokens_per_second", "mfu", "hours", "cost_usd", "compile_seconds", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A plan: the part of the page, a job in `jobs`, its overrides and the slice."""

    part: str
    job: str
    on: str
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join((self.part, self.job, self.on, *self.overrides))


UNROLLED = tuple(
    Row("unroll", job, on, overrides)
    for job, on, recomputed in (
        ("qwen3-0.6b", "v5e-8", ("remat=full",)),
        ("qwen3-0.6b", "v5e-8", ("remat=none",)),
        ("smollm2-135m", "v5e-1", ("remat=full",)),
        ("smollm2-135m", "v5e-1", ("remat=none",)),
    )
    for overrides in ((*recomputed, "unroll=false"), (*recomputed, "unroll=true"), (*recomputed, "unroll=auto"))
)
ROWS = UNROLLED


def planned(row: Row) -> dict[str, Any]:
    """Return the plan of a row. An error is recorded with its code in place of the values."""
    known = {"part": row.part, "job": row.job, "slice": row.on, "overrides": list(row.overrides)}
    start = time.monotonic()
    try:
        job = load(HERE / "jobs" / f"{row.job}.yaml", list(row.overrides)).job
        [found] = plan(job, on=[row.on], progress=False).rows
    except UserError as error:
        return {**known, "fits": False, "error": f"{error.code}: {error.what}"}
    return {**known, **{key: found.get(key) for key in KEPT}, "plan_seconds": round(time.monotonic() - start, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of one part as a Markdown table."""
    lines = [
        "| job | slice | mesh | overrides | peak GiB | step | tokens/s | $ for 1,000 steps |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        start = f"| {row['job']} | {row['slice']} | {row.get('mesh') or '-'} | `{' '.join(row['overrides'])}` "
        if row.get("hbm_peak_bytes") is None:
            lines.append(f"{start}| - | {row['error']} | - | - |")
            continue
        peak = f"| {row['hbm_peak_bytes'] / GIB:.2f} of {row['hbm_limit_bytes'] / GIB:.2f} "
        if not row["fits"]:
            lines.append(f"{start}{peak}| does not fit | - | - |")
            continue
        step, rate, usd = row["step_seconds"]["mid"], row["tokens_per_second"], (row["cost_usd"] or {}).get("on_demand")
        money = "-" if usd is None else f"{usd:,.2f}"
        lines.append(f"{start}{peak}| {step:.3f} s | {rate:,.0f} | {money} |")
    return "\n".join(lines)


def write_tables(rows: list[dict[str, Any]]) -> None:
    """Replace the tables of the page between their marks."""
    text = PAGE.read_text("utf-8")
    for part in sorted({row["part"] for row in rows}):
        start, end = f"<!-- scale {part}: start -->\n", f"<!-- scale {part}: end -->\n"
        before, _, rest = text.partition(start)
        _, mark, after = rest.partition(end)
        if mark:
            own = table([row for row in rows if row["part"] == part])
            text = f"{before}{start}\n{own}\n\n{end}{after}"
    PAGE.write_text(text, "utf-8")


def main(words: list[str]) -> int:
    """Plan the chosen rows, write the results after each, and write the tables."""
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    if words != ["--table"]:
        chosen = [row for row in ROWS if set(words) <= {row.part, row.job, row.on}]
        for row in chosen:
            known["rows"][row.key] = found = planned(row)
            step = found.get("step_seconds")
            print(row.key, found.get("error") or (step and step["mid"]), found.get("unroll"), flush=True)
            known["date"] = datetime.now(UTC).date().isoformat()
            known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
            known["rows"] = {one.key: known["rows"][one.key] for one in ROWS if one.key in known["rows"]}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    write_tables(list(known["rows"].values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
