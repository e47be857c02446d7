"""Plan Llama 3.1 on 1, 16 and 256 slices of 256 chips, and compute the goodput under failures.

python bench/slices_plan.py             # all rows; needs libtpu, no TPU. The rows of 256 slices take minutes each
python bench/slices_plan.py 16xv5e-256  # only rows with this job or slice. The other rows stay
python bench/slices_plan.py --table     # only compute the goodput and write the tables of docs/scale.md again

Every row is compiled for all of its slices: no row is derived from a smaller one. The goodput is computed from the
recorded plans with the assumptions of `forerun plan`, so it needs no new plan if one of them changes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.errors import UserError
from forerun.hardware.slices import slice_named
from forerun.planner.cost.failures import FailureEstimate, failure_estimate
from forerun.planner.cost.job_cost import ASSUMPTIONS, Assumptions, Saves
from forerun.units import GIB, Bytes, Count, Seconds
from forerun.verbs.plan import plan

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "slices_plan.json"
PAGE = HERE.parent / "docs" / "scale.md"
KEPT = (
    "fits", "hbm_peak_bytes", "hbm_limit_bytes", "host_bytes", "mesh", "chips", "program", "step_seconds",
    "time_breakdown", "tokens_per_second", "mfu", "limit", "cost_usd", "compile_seconds", "checkpoint_every",
    "checkpoint_bytes", "failures",
)  # fmt: skip
COUNTS = (1, 16, 256)
CHIP_DAYS = ASSUMPTIONS.gpu_failure_days  # Meta's rate of failures for each accelerator, with four on a host


@dataclass(frozen=True)
class Row:
    """A plan: a job in `jobs`, its slice, its sequences per slice, and other overrides."""

    job: str
    on: str
    batch: int  # sequences of a step, on all slices
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join((self.job, self.on, *self.words))

    @property
    def words(self) -> tuple[str, ...]:
        return (f"batch={self.batch}", *self.overrides)


def many(job: str, on: str, batch: int) -> tuple[Row, ...]:
    """Return the rows of a job with `batch` sequences per slice."""
    return tuple(Row(job, on if n == 1 else f"{n}x{on}", batch * n) for n in COUNTS)


ROWS = (
    *many("llama3.1-8b-slices", "v5e-256", 256),
    *many("llama3.1-70b-slices", "v6e-256", 512),
    *many("llama3.1-405b", "v5p-512", 256),
    Row("llama3.1-405b", "v6e-256", 256, ("remat={policy: named, offload: [layer_in]}",)),
    Row("llama3.1-405b", "v6e-256", 64, ("remat={policy: named, offload: [layer_in]}", "mesh.fsdp=64", "mesh.tp=4")),
)
# The batch divides over 3 and 4, and over 15 and 16 slices.
ELASTIC = (
    Row("llama3.1-8b-slices", "4xv5e-256", 12 * 256, ("micro_batch=1", "mesh.slices=4", "mesh.min_slices=3")),
    Row("llama3.1-8b-slices", "16xv5e-256", 240 * 256, ("micro_batch=1", "mesh.slices=16", "mesh.min_slices=15")),
)


def planned(row: Row) -> dict[str, Any]:
    """Return the plan of a row. An error is recorded with its code in place of the values."""
    known = {"job": row.job, "slice": row.on, "batch": row.batch, "overrides": list(row.overrides)}
    start, used = time.monotonic(), children_seconds()
    try:
        job = load(HERE / "jobs" / f"{row.job}.yaml", list(row.words)).job
        [found] = plan(job, on=[row.on], progress=False, use_cache=False).rows
    except UserError as error:
        return {**known, "fits": False, "error": f"{error.code}: {error.what}"}
    return {
        **known,
        "tokens_per_step": row.batch * job.sequence,
        **{key: found.get(key) for key in KEPT},
        "plan_seconds": round(time.monotonic() - start, 1),
        "plan_processor_seconds": round(children_seconds() - used, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def children_seconds() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def estimate(row: dict[str, Any], assumptions: Assumptions = ASSUMPTIONS, host_days: float | None = None) -> Any:
    """Return the effect of failures on a recorded row, with other assumptions than those of its plan."""
    where, found = slice_named(row["slice"]), row["failures"]
    least = [int(word.partition("=")[2]) for word in row["overrides"] if word.startswith("mesh.min_slices=")]
    pause, write = Seconds(found["pause_seconds"]), Seconds(found["write_seconds"])
    return failure_estimate(
        row["step_seconds"]["mid"],
        Saves(row["checkpoint_every"], 1, Bytes(row["checkpoint_bytes"]), pause, write),
        where.hosts,
        assumptions.tpu_host_failure_days if host_days is None else host_days,
        slices=where.slices,
        least=least[0] if least else where.slices,
        slice_wait=60.0 if least else 0.0,
        assumptions=assumptions,
    )


def plans_table(rows: list[dict[str, Any]]) -> str:
    """Return memory, time and cost of the rows as a Markdown table."""
    lines = [
        "| job | slices | overrides | mesh | peak GiB | step | tokens per step | tokens/s | MFU | $ per 10^12 tokens "
        "| plan, CPU s |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        other = f"`{' '.join(row['overrides'])}`" if row["overrides"] else "-"
        start = f"| {row['job'].removesuffix('-slices')} | {row['slice']} | {other} | {row.get('mesh') or '-'} "
        if row.get("hbm_peak_bytes") is None:
            lines.append(f"{start}| - | {row['error']} | - | - | - | - | - |")
            continue
        peak = f"| {row['hbm_peak_bytes'] / GIB:.2f} of {row['hbm_limit_bytes'] / GIB:.2f} "
        last = f"| {row['plan_processor_seconds']:.0f} |"
        if not row["fits"]:
            lines.append(f"{start}{peak}| does not fit | - | - | - | - {last}")
            continue
        lines.append(
            f"{start}{peak}| {row['step_seconds']['mid']:.2f} s | {Count(row['tokens_per_step'])} "
            f"| {row['tokens_per_second']:,.0f} | {row['mfu']:.0%} | {usd_per_trillion(row):,.0f} {last}"
        )
    return "\n".join(lines)


def usd_per_trillion(row: dict[str, Any]) -> float:
    """Return the dollars of 10^12 tokens on demand: the run of 1,000 steps, with its start and checkpoints."""
    return float(row["cost_usd"]["on_demand"]) / (1000 * row["tokens_per_step"]) * 1e12


def failures_table(rows: list[dict[str, Any]]) -> str:
    """Return the failures and the goodput of the rows that fit as a Markdown table."""
    lines = [
        "| job | slices | hosts | failure every | save | save every | recovery | goodput | with a spare host "
        "| failures as Meta's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in (row for row in rows if row["fits"]):
        found = estimate(row)
        spare = estimate(row, replace(ASSUMPTIONS, replace_seconds=0.0))
        more = estimate(row, host_days=CHIP_DAYS / (slice_named(row["slice"]).chips / found.hosts))
        lines.append(
            f"| {row['job'].removesuffix('-slices')} | {row['slice']} | {found.hosts:,} "
            f"| {duration(found.between_seconds)} | {found.pause_seconds:.1f} s + {found.write_seconds:.0f} s "
            f"| {found.every:,} steps, {duration(found.every * row['step_seconds']['mid'])} "
            f"| {duration(found.recovery_seconds)} | {found.goodput:.1%} | {spare.goodput:.1%} | {more.goodput:.1%} |"
        )
    return "\n".join(lines)


def elastic_table(rows: list[dict[str, Any]]) -> str:
    """Return the goodput with and without `mesh.min_slices`, by the time until a host is replaced."""
    lines = [
        "| job | slices | `mesh.min_slices` | tokens per step | another host after | waits for it "
        "| continues without |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        least = next(word.partition("=")[2] for word in row["overrides"] if word.startswith("mesh.min_slices="))
        for seconds in (900.0, 6 * 3600.0, 3 * 86_400.0):
            found: FailureEstimate = estimate(row, replace(ASSUMPTIONS, replace_seconds=seconds))
            lines.append(
                f"| {row['job'].removesuffix('-slices')} | {row['slice']} | {least} | {Count(row['tokens_per_step'])} "
                f"| {duration(seconds)} | {found.goodput:.1%} | {found.fewer_slices_goodput:.1%} |"
            )
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a time in its natural unit, with three digits."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def write_tables(known: dict[str, Any]) -> None:
    """Replace the tables of the page between their marks."""
    text = PAGE.read_text("utf-8")
    rows = [known[row.key] for row in ROWS if row.key in known]
    elastic = [known[row.key] for row in ELASTIC if row.key in known and known[row.key]["fits"]]
    for name, table in (
        ("plans", plans_table(rows)),
        ("failures", failures_table(rows)),
        ("elastic", elastic_table(elastic)),
    ):
        start, end = f"<!-- slices {name}: start -->\n", f"<!-- slices {name}: end -->\n"
        before, _, rest = text.partition(start)
        _, mark, after = rest.partition(end)
        if mark:
            text = f"{before}{start}\n{table}\n\n{end}{after}"
    PAGE.write_text(text, "utf-8")


def main(words: list[str]) -> int:
    """Plan the chosen rows, write the results after each, and write the tables."""
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    if words != ["--table"]:
        for row in (row for row in (*ROWS, *ELASTIC) if set(words) <= {row.job, row.on}):
            known["rows"][row.key] = found = planned(row)
            print(row.key, found.get("error") or found["step_seconds"], found.get("plan_processor_seconds"), flush=True)
            known["date"] = datetime.now(UTC).date().isoformat()
            known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    write_tables(known["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
